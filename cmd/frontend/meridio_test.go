package main

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/test/clitest"
)

// adopted sets variables and returns those of vipgate that result.
func adopted(t *testing.T, variables map[string]string) map[string]string {
	t.Helper()
	(&clitest.Container{}).Environment(t)
	for name, value := range variables {
		t.Setenv(name, value)
	}
	for _, a := range program().Aliases {
		if _, set := os.LookupEnv(a.Variable); !set { // removed when the test ends
			t.Setenv(a.Variable, "")
			os.Unsetenv(a.Variable)
		}
	}
	cli.Adopt(program().Aliases)
	got := map[string]string{}
	for _, a := range program().Aliases {
		if value, set := os.LookupEnv(a.Variable); set {
			got[a.Variable] = value
		}
	}
	return got
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
		{"VIPGATE_ON_DIRECTORY_GONE", "hold", "on-missing-directory", "hold"},
	}
	tested := map[string]bool{}
	for _, tt := range tests {
		tested[tt.variable] = true
		t.Run(tt.variable+"="+tt.value, func(t *testing.T) {
			var warnings bytes.Buffer
			warnIgnored([]string{tt.variable + "=" + tt.value}, &warnings)
			if warnings.Len() > 0 {
				t.Errorf("warned: %s", &warnings)
			}
			adopted(t, map[string]string{tt.variable: tt.value})
			parsed, err := parser(t).Parse([]string{"run"})
			if err != nil {
				t.Fatal(err)
			}
			for _, f := range parsed.Flags() {
				if f.Name == tt.flag {
					if got := fmt.Sprint(reflect.Indirect(f.Target).Interface()); got != tt.want {
						t.Errorf("--%s is %s, want %s", tt.flag, got, tt.want)
					}
					return
				}
			}
			t.Errorf("there is no flag --%s", tt.flag)
		})
	}
	for _, a := range program().Aliases {
		for _, name := range a.Names {
			if !tested[name] {
				t.Errorf("%s is adopted, and not tested", name)
			}
		}
	}
}

func TestPrecedenceOfVariables(t *testing.T) {
	for _, tt := range []struct {
		name            string
		variables, want map[string]string
	}{
		{
			"vipgate's before Meridio's",
			map[string]string{"NFE_TABLE_ID": "5000", "VIPGATE_TABLE_ID": "6000"},
			map[string]string{"VIPGATE_TABLE_ID": "6000"},
		},
		{
			"that in Meridio's code before the documented one",
			map[string]string{"NFE_BIRD_KERNEL_SCAN_TIME": "7", "NFE_BIRD_SCAN_TIME": "8"},
			map[string]string{"VIPGATE_BIRD_KERNEL_SCAN_TIME": "7s"},
		},
		// It must reach the check that refuses it, and not turn into the default.
		{"an empty value", map[string]string{"NFE_LB_SOCKET": ""}, map[string]string{"VIPGATE_LB_SOCKET": ""}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := adopted(t, tt.variables); !maps.Equal(got, tt.want) {
				t.Errorf("got %v, want %v", got, tt.want)
			}
		})
	}
}

func TestIgnoredMeridioVariables(t *testing.T) {
	var warnings bytes.Buffer
	warnIgnored([]string{
		"NFE_NSP_SERVICE=nsp:7778", "NFE_VRRPS=10.0.0.1", "NFE_DELAY_CONNECTIVITY=1s", "NFE_DELAYCONNECTIVITY=1s",
		"NFE_MAX_SESSION_ERRORS=5", "NFE_ECMP=true", "HOME=/", "NFEX=1",
	}, &warnings)
	const want = "NFE_DELAYCONNECTIVITY, NFE_DELAY_CONNECTIVITY, NFE_MAX_SESSION_ERRORS, NFE_NSP_SERVICE, NFE_VRRPS\n"
	if got := warnings.String(); !strings.HasSuffix(got, ": "+want) || strings.Count(got, "\n") != 1 {
		t.Errorf("warned %q, want one line that ends with %q", got, want)
	}
	warnings.Reset()
	if warnIgnored([]string{"HOME=/"}, &warnings); warnings.Len() > 0 {
		t.Errorf("warned %q about no variable", &warnings)
	}
}
