package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/test/clitest"
)

// environment is an environment of variables.
type environment map[string]string

func (e environment) lookup(name string) (string, bool) {
	v, ok := e[name]
	return v, ok
}

func (e environment) set(name, value string) error {
	e[name] = value
	return nil
}

func (e environment) list() []string {
	var list []string
	for name, value := range e {
		list = append(list, name+"="+value)
	}
	return list
}

func (e environment) adopt(warn io.Writer) error {
	_, err := adoptMeridio(e.lookup, e.set, e.list(), warn)
	return err
}

// Every variable of Meridio's frontend that docs/configuration.md lists, with a value as its
// deployments have it, sets a flag.
func TestMeridioVariablesSetFlags(t *testing.T) {
	tests := []struct{ variable, value, flag, want string }{
		{"NFE_EXTERNAL_INTERFACE", "eth1", "external-interface", "eth1"},
		{"NFE_BIRD_CONFIG_PATH", "/etc/bird2", "bird-dir", "/etc/bird2"},
		{"NFE_BIRD_COMMUNICATION_SOCK", "/run/bird.ctl", "bird-socket", "/run/bird.ctl"},
		{"NFE_BIRD_LOG_FILE_SIZE", "20000", "bird-log-file-size", "20000"},
		{"NFE_BIRD_KERNEL_SCAN_TIME", "7", "bird-kernel-scan-time", "7s"},
		{"NFE_BIRD_SCAN_TIME", "8", "bird-kernel-scan-time", "8s"},
		{"NFE_LOCAL_AS", "64512", "local-as", "64512"},
		{"NFE_REMOTE_AS", "4200000001", "remote-as", "4200000001"},
		{"NFE_BGP_LOCAL_PORT", "179", "bgp-local-port", "179"},
		{"NFE_BGP_REMOTE_PORT", "1179", "bgp-remote-port", "1179"},
		{"NFE_BGP_HOLD_TIME", "9", "bgp-hold-time", "9s"},
		{"NFE_BGP_HOLD_TIME", "12s", "bgp-hold-time", "12s"},
		{"NFE_TABLE_ID", "5000", "table-id", "5000"},
		{"NFE_ECMP", "true", "ecmp", "true"},
		{"NFE_DROP_IF_NO_PEER", "false", "drop-if-no-peer", "false"},
		{"NFE_LOG_BIRD", "true", "log-bird", "true"},
		{"NFE_LOG_LEVEL", "ERROR", "log-level", "error"},
		{"NFE_LOG_LEVEL", "TRACE", "log-level", "debug"},
		{"NFE_GRPC_MAX_BACKOFF", "5s", "max-backoff", "5s"},
		{"NFE_METRICS_ENABLED", "false", "metrics-enabled", "false"},
		{"NFE_METRICS_PORT", "9224", "metrics-port", "9224"},
		{"NFE_LB_SOCKET", "unix:///run/lb.sock", "lb-socket", "unix:///run/lb.sock"},
		{"MERIDIO_READINESS_DIR", "/var/run/meridio", "readiness-dir", "/var/run/meridio"},
	}
	tested := map[string]bool{}
	for _, tt := range tests {
		tested[tt.variable] = true
		t.Run(tt.variable+"="+tt.value, func(t *testing.T) {
			var warnings bytes.Buffer
			env := environment{tt.variable: tt.value}
			if err := env.adopt(&warnings); err != nil {
				t.Fatal(err)
			}
			if warnings.Len() > 0 {
				t.Errorf("warned: %s", &warnings)
			}
			c := clitest.Container{Args: []string{"run"}}
			for name, value := range env {
				if strings.HasPrefix(name, ourPrefix) {
					c.Env = append(c.Env, clitest.Env{Name: name, Value: value})
				}
			}
			c.Environment(t)
			parsed, err := parser(t).Parse(c.Args)
			if err != nil {
				t.Fatal(err)
			}
			for _, f := range parsed.Flags() {
				if f.Name == tt.flag {
					if got := fmt.Sprint(f.Target.Interface()); got != tt.want {
						t.Errorf("--%s is %s, want %s", tt.flag, got, tt.want)
					}
					return
				}
			}
			t.Errorf("there is no flag --%s", tt.flag)
		})
	}
	for _, a := range aliases {
		for _, name := range a.meridio {
			if !tested[name] {
				t.Errorf("%s is honoured, and not tested", name)
			}
		}
	}
}

func TestOurVariableWinsOverMeridios(t *testing.T) {
	env := environment{"NFE_TABLE_ID": "5000", "VIPGATE_TABLE_ID": "6000"}
	if err := env.adopt(io.Discard); err != nil {
		t.Fatal(err)
	}
	if got := env["VIPGATE_TABLE_ID"]; got != "6000" {
		t.Errorf("VIPGATE_TABLE_ID is %s", got)
	}
}

func TestTheNameInMeridiosCodeWinsOverTheDocumentedOne(t *testing.T) {
	env := environment{"NFE_BIRD_KERNEL_SCAN_TIME": "7", "NFE_BIRD_SCAN_TIME": "8"}
	if err := env.adopt(io.Discard); err != nil {
		t.Fatal(err)
	}
	if got := env["VIPGATE_BIRD_KERNEL_SCAN_TIME"]; got != "7s" {
		t.Errorf("VIPGATE_BIRD_KERNEL_SCAN_TIME is %s", got)
	}
}

// An empty readiness socket must reach the check that refuses it: it must not
// turn into the default.
func TestAnEmptyValueOfMeridioStaysEmpty(t *testing.T) {
	env := environment{"NFE_LB_SOCKET": ""}
	if err := env.adopt(io.Discard); err != nil {
		t.Fatal(err)
	}
	if got, set := env["VIPGATE_LB_SOCKET"]; !set || got != "" {
		t.Errorf("VIPGATE_LB_SOCKET is %q, set: %t", got, set)
	}
}

func TestMeaninglessMeridioVariablesAreNamedInOneLine(t *testing.T) {
	var warnings bytes.Buffer
	env := environment{
		"NFE_NSP_SERVICE": "nsp:7778", "NFE_VRRPS": "10.0.0.1", "NFE_DELAY_CONNECTIVITY": "1s", "NFE_DELAYCONNECTIVITY": "1s",
		"NFE_MAX_SESSION_ERRORS": "5", "NFE_ECMP": "true", "HOME": "/", "NFEX": "1",
	}
	before := maps.Clone(env)
	if err := env.adopt(&warnings); err != nil {
		t.Fatal(err)
	}
	const want = "NFE_DELAYCONNECTIVITY, NFE_DELAY_CONNECTIVITY, NFE_MAX_SESSION_ERRORS, NFE_NSP_SERVICE, NFE_VRRPS\n"
	if got := warnings.String(); !strings.HasSuffix(got, ": "+want) || strings.Count(got, "\n") != 1 {
		t.Errorf("warned %q, want one line that ends with %q", got, want)
	}
	before["VIPGATE_ECMP"] = "true"
	if !maps.Equal(env, before) {
		t.Errorf("the environment became %v", slices.Sorted(maps.Keys(env)))
	}
}

func TestNoMeridioVariableIsNoWarning(t *testing.T) {
	var warnings bytes.Buffer
	if err := (environment{"HOME": "/"}).adopt(&warnings); err != nil || warnings.Len() > 0 {
		t.Errorf("got %v, %q", err, &warnings)
	}
}

func TestARefusedConversionNamesTheVariable(t *testing.T) {
	refuse := func(string) (string, error) { return "", errors.New("no") }
	old := aliases[0].convert
	aliases[0].convert = refuse
	t.Cleanup(func() { aliases[0].convert = old })
	err := environment{"NFE_EXTERNAL_INTERFACE": "x"}.adopt(io.Discard)
	var user *cli.UsageError
	if !errors.As(err, &user) || !strings.Contains(err.Error(), `NFE_EXTERNAL_INTERFACE="x"`) {
		t.Errorf("got %v", err)
	}
}
