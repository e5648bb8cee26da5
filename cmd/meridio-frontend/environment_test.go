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
	"github.com/vipgate/vipgate/test/harness"
)

// adopted sets variables and returns the resulting variables of vipgate. nil sets no additional
// variables.
func adopted(t *testing.T, variables map[string]string) map[string]string {
	t.Helper()
	if variables != nil {
		(&clitest.Container{}).Environment(t)
	}
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

// Every variable of Meridio's frontend in docs/meridio.md sets a flag, with a value as in
// Meridio's deployments.
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
		{"NFE_ECMP", "True", "ecmp", "true"},
		{"NFE_ECMP", "1", "ecmp", "true"},
		{"NFE_LOG_BIRD", "true", "log-bird", "true"},
		{"NFE_LOG_LEVEL", "ERROR", "log-level", "error"},
		{"NFE_LOG_LEVEL", "TRACE", "log-level", "debug"},
		{"NFE_LOG_LEVEL", "CRITICAL", "log-level", "info"}, // Meridio treats unknown levels as INFO
		{"NFE_NSP_SERVICE", "nsp-service-trench-a.red:7778", "nsp-service", "nsp-service-trench-a.red:7778"},
		{"NFE_VRRPS", "169.254.100.254,100:100::254", "vrrp", "[169.254.100.254 100:100::254]"},
		{"NFE_NAMESPACE", "red", "namespace", "red"},
		{"NFE_TRENCH_NAME", "trench-a", "trench-name", "trench-a"},
		{"NFE_ATTRACTOR_NAME", "attractor-a-1", "attractor-name", "attractor-a-1"},
		{"NFE_NSP_ENTRY_TIMEOUT", "20s", "nsp-entry-timeout", "20s"},
		{"NFE_GRPC_KEEPALIVE_TIME", "1m", "nsp-keepalive-time", "1m0s"},
		{"NFE_GRPC_MAX_BACKOFF", "5s", "max-backoff", "5s"},
		{"NFE_METRICS_ENABLED", "false", "metrics-enabled", "false"},
		{"NFE_METRICS_PORT", "9224", "metrics-address", "0.0.0.0:9224"},
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
			harness.Must(t, err)
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
		{
			"one that the operator left empty",
			map[string]string{"NFE_LB_SOCKET": "", "NFE_LOG_LEVEL": ""},
			map[string]string{},
		},
		{
			"the first that is not empty",
			map[string]string{"NFE_BIRD_KERNEL_SCAN_TIME": "", "NFE_BIRD_SCAN_TIME": "8"},
			map[string]string{"VIPGATE_BIRD_KERNEL_SCAN_TIME": "8s"},
		},
		// The check must refuse the value, instead of using the default.
		{
			"an empty value of Meridio 2",
			map[string]string{"MERIDIO_READINESS_DIR": ""},
			map[string]string{"VIPGATE_READINESS_DIR": ""},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := adopted(t, tt.variables); !maps.Equal(got, tt.want) {
				t.Errorf("got %v, want %v", got, tt.want)
			}
		})
	}
}

// meridioVariables lists the variables of Meridio 1.2.8: the names in its code, different names
// in its documents, and the variables of its pod. The code joins words that the documents
// separate.
const meridioVariables = `NFE_VRRPS NFE_EXTERNAL_INTERFACE NFE_BIRD_CONFIG_PATH NFE_BIRD_COMMUNICATION_SOCK
NFE_BIRD_LOG_FILE_SIZE NFE_BIRD_KERNEL_SCAN_TIME NFE_BIRD_SCAN_TIME NFE_LOCAL_AS NFE_REMOTE_AS NFE_BGP_LOCAL_PORT
NFE_BGP_REMOTE_PORT NFE_BGP_HOLD_TIME NFE_TABLE_ID NFE_ECMP NFE_DROP_IF_NO_PEER NFE_LOG_BIRD NFE_NAMESPACE
NFE_NSP_SERVICE NFE_TRENCH_NAME NFE_ATTRACTOR_NAME NFE_LOG_LEVEL NFE_NSP_ENTRY_TIMEOUT NFE_GRPC_KEEPALIVE_TIME
NFE_GRPC_MAX_BACKOFF NFE_DELAYCONNECTIVITY NFE_DELAY_CONNECTIVITY NFE_DELAYNOCONNECTIVITY
NFE_DELAY_NO_CONNECTIVITY NFE_MAXSESSIONERRORS NFE_MAX_SESSION_ERRORS NFE_METRICS_ENABLED NFE_METRICS_PORT
NFE_LB_SOCKET NFE_CONFIG_MAP_NAME`

func TestEveryMeridioVariableIsKnown(t *testing.T) {
	page, err := os.ReadFile("../../docs/meridio.md")
	harness.Must(t, err)
	var environ []string
	for _, name := range strings.Fields(meridioVariables) {
		environ = append(environ, name+"=1")
		if !bytes.Contains(page, []byte("`"+name+"`")) {
			t.Errorf("docs/meridio.md does not have %s", name)
		}
	}
	var warnings bytes.Buffer
	if warnIgnored(environ, &warnings); warnings.Len() > 0 {
		t.Errorf("warned: %s", &warnings)
	}
}

func TestIgnoredMeridioVariables(t *testing.T) {
	var warnings bytes.Buffer
	warnIgnored([]string{
		"NFE_NSP_SERVICE=nsp:7778", "NFE_DELAY_CONNECTIVITY=1s", "NFE_SOMETHING=1", "NFE_ANYTHING=2", "NFE_ECMP=true",
		"HOME=/", "NFEX=1",
	}, &warnings)
	const want = "NFE_ANYTHING, NFE_SOMETHING\n"
	if got := warnings.String(); !strings.HasSuffix(got, ": "+want) || strings.Count(got, "\n") != 1 {
		t.Errorf("warned %q, want one line that ends with %q", got, want)
	}
	warnings.Reset()
	if warnIgnored([]string{"HOME=/"}, &warnings); warnings.Len() > 0 {
		t.Errorf("warned %q about no variable", &warnings)
	}
}

// Values that Meridio allows and vipgate does not are refused with the name of the variable.
func TestRefusedMeridioVariables(t *testing.T) {
	for variable, value := range map[string]string{
		"NFE_LOCAL_AS": "64512.1", "NFE_BGP_LOCAL_PORT": "bgp", "NFE_TABLE_ID": "-1", "NFE_NSP_ENTRY_TIMEOUT": "30",
		"NFE_ECMP": "perhaps", "NFE_VRRPS": "gateway-a", "NFE_METRICS_PORT": "70000", "NFE_BIRD_LOG_FILE_SIZE": "20k",
	} {
		t.Run(variable, func(t *testing.T) {
			adopted(t, map[string]string{variable: value})
			_, err := parser(t).Parse([]string{"run"})
			harness.WantError(t, err, value)
		})
	}
}

func TestDefaultsOfMeridioPod(t *testing.T) {
	for _, tt := range []struct {
		name      string
		variables map[string]string
		want      string
	}{
		{
			"pod", nil,
			"unix:///tmp/frontend.sock unix:///tmp/health.sock 0.0.0.0:2224 /var/log/bird.log 20000 /etc/bird/svid.json",
		},
		{"set by the user", map[string]string{
			"VIPGATE_ADMIN_SOCKET": "unix:///var/run/bird/a.sock", "VIPGATE_HEALTH_SOCKET": "",
			"VIPGATE_METRICS_ADDRESS": "192.0.2.1", "NFE_BIRD_LOG_FILE_SIZE": "7",
			"VIPGATE_IDENTITY_CACHE": "",
		}, "unix:///var/run/bird/a.sock  192.0.2.1:2224 /var/log/bird.log 7 "},
	} {
		t.Run(tt.name, func(t *testing.T) {
			adopted(t, tt.variables)
			var line commandLine
			if _, err := parserOf(t, &line).Parse([]string{"run"}); err != nil {
				t.Fatal(err)
			}
			r := line.Run
			got := fmt.Sprint(r.AdminSocket, " ", r.HealthSocket, " ", r.MetricsAddress, " ", r.BirdLogFile, " ",
				r.BirdLogFileSize, " ", r.IdentityCache)
			if got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}

func TestArgumentsOfMeridio(t *testing.T) {
	for args, want := range map[string]string{
		"--debug": "debug", "-debug": "debug", "-version": "--version", "-help": "--help", "": "",
		"run --debug": "run --debug", "status": "status",
	} {
		if got := strings.Join(arguments(strings.Fields(args)), " "); got != want {
			t.Errorf("%q became %q, want %q", args, got, want)
		}
	}
}
