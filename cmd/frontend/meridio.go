package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/vipgate/vipgate/cmd/internal/cli"
)

// aliases maps the variables of Meridio's frontend (docs/meridio.md), with two names where
// its code and its documentation differ, and the variable of Meridio 2's router for the directory
// of readiness files.
var aliases = []cli.Alias{
	meridio("VIPGATE_EXTERNAL_INTERFACE", nil, "NFE_EXTERNAL_INTERFACE"),
	meridio("VIPGATE_BIRD_DIR", nil, "NFE_BIRD_CONFIG_PATH"),
	meridio("VIPGATE_BIRD_SOCKET", nil, "NFE_BIRD_COMMUNICATION_SOCK"),
	meridio("VIPGATE_BIRD_LOG_FILE_SIZE", nil, "NFE_BIRD_LOG_FILE_SIZE"),
	meridio("VIPGATE_BIRD_KERNEL_SCAN_TIME", seconds, "NFE_BIRD_KERNEL_SCAN_TIME", "NFE_BIRD_SCAN_TIME"),
	meridio("VIPGATE_LOCAL_AS", nil, "NFE_LOCAL_AS"),
	meridio("VIPGATE_REMOTE_AS", nil, "NFE_REMOTE_AS"),
	meridio("VIPGATE_BGP_LOCAL_PORT", nil, "NFE_BGP_LOCAL_PORT"),
	meridio("VIPGATE_BGP_REMOTE_PORT", nil, "NFE_BGP_REMOTE_PORT"),
	meridio("VIPGATE_BGP_HOLD_TIME", seconds, "NFE_BGP_HOLD_TIME"),
	meridio("VIPGATE_TABLE_ID", nil, "NFE_TABLE_ID"),
	meridio("VIPGATE_ECMP", nil, "NFE_ECMP"),
	meridio("VIPGATE_DROP_IF_NO_PEER", nil, "NFE_DROP_IF_NO_PEER"),
	meridio("VIPGATE_LOG_BIRD", nil, "NFE_LOG_BIRD"),
	meridio("VIPGATE_LOG_LEVEL", level, "NFE_LOG_LEVEL"),
	meridio("VIPGATE_MAX_BACKOFF", nil, "NFE_GRPC_MAX_BACKOFF"),
	meridio("VIPGATE_VRRP", nil, "NFE_VRRPS"),
	meridio("VIPGATE_NSP_SERVICE", nil, "NFE_NSP_SERVICE"),
	meridio("VIPGATE_NAMESPACE", nil, "NFE_NAMESPACE"),
	meridio("VIPGATE_TRENCH_NAME", nil, "NFE_TRENCH_NAME"),
	meridio("VIPGATE_ATTRACTOR_NAME", nil, "NFE_ATTRACTOR_NAME"),
	meridio("VIPGATE_NSP_ENTRY_TIMEOUT", nil, "NFE_NSP_ENTRY_TIMEOUT"),
	meridio("VIPGATE_NSP_KEEPALIVE_TIME", nil, "NFE_GRPC_KEEPALIVE_TIME"),
	meridio("VIPGATE_METRICS_PORT", nil, "NFE_METRICS_PORT"),
	meridio("VIPGATE_METRICS_ENABLED", nil, "NFE_METRICS_ENABLED"),
	meridio("VIPGATE_LB_SOCKET", nil, "NFE_LB_SOCKET"),
	cli.Renamed("VIPGATE_READINESS_DIR", "MERIDIO_READINESS_DIR"),
}

// meridio returns an alias of variables of Meridio's frontend. An empty variable counts as unset,
// because Meridio's operator sets variables without a value to "".
func meridio(variable string, convert func(string) string, names ...string) cli.Alias {
	return cli.Alias{Names: names, Variable: variable, Convert: convert, EmptyIsUnset: true}
}

// noEffect lists variables of Meridio's frontend that have no effect in vipgate.
type noEffect struct {
	names []string
	why   string
}

var withoutEffect = []noEffect{
	{
		[]string{"NFE_DELAYCONNECTIVITY", "NFE_DELAY_CONNECTIVITY", "NFE_DELAYNOCONNECTIVITY", "NFE_DELAY_NO_CONNECTIVITY"},
		"Meridio's interval of polling BIRD; a session that is lost is seen within 10 ms",
	},
	{
		[]string{"NFE_MAXSESSIONERRORS", "NFE_MAX_SESSION_ERRORS"},
		"Meridio's number of failed `birdc` calls; a BIRD that does not answer is replaced within 10 s",
	},
	{[]string{"NFE_CONFIG_MAP_NAME"}, "the operator sets it for older frontends; the NSP has the configuration"},
}

func seconds(s string) string {
	if _, err := strconv.ParseUint(s, 10, 32); err == nil {
		return s + "s"
	}
	return s
}

// level converts Meridio's log levels. TRACE becomes debug. An unknown level becomes info, as in
// Meridio.
func level(s string) string {
	switch l := strings.ToLower(s); l {
	case "trace":
		return "debug"
	case "debug", "info", "warn", "error":
		return l
	}
	return "info"
}

// podVariables holds the defaults that differ in Meridio's pod. There only /etc/bird,
// /var/run/bird, /var/log and /tmp are writable, probes run in the container, and metrics are
// scraped at the pod's address. BIRD's log file has the path that Meridio uses.
var podVariables = map[string]string{
	"VIPGATE_ADMIN_SOCKET":       "unix:///tmp/frontend.sock",
	"VIPGATE_HEALTH_SOCKET":      "unix:///tmp/health.sock",
	"VIPGATE_IDENTITY_CACHE":     "/etc/bird/svid.json",
	"VIPGATE_METRICS_HOST":       "0.0.0.0",
	"VIPGATE_BIRD_LOG_FILE":      "/var/log/bird.log",
	"VIPGATE_BIRD_LOG_FILE_SIZE": "20000",
}

// inMeridioPod reports whether the process runs as Meridio's frontend: the environment names the
// NSP, which is the only source of the configuration.
func inMeridioPod() bool {
	switch os.Getenv("VIPGATE_CONFIG_SOURCE") {
	case "nsp":
		return true
	case "", "auto":
		_, err := os.Stat(cmp.Or(os.Getenv("VIPGATE_TRENCH_FILE"), defaultTrenchFile))
		service := cmp.Or(os.Getenv("VIPGATE_NSP_SERVICE"), os.Getenv("NFE_NSP_SERVICE"))
		return service != "" && errors.Is(err, fs.ErrNotExist)
	}
	return false
}

// adoptPod sets the podVariables that neither the user nor Meridio's operator set.
func adoptPod() {
	if !inMeridioPod() {
		return
	}
	for variable, value := range podVariables {
		_, set := os.LookupEnv(variable)
		for _, a := range aliases {
			given := slices.ContainsFunc(a.Names, func(name string) bool { return os.Getenv(name) != "" })
			set = set || a.Variable == variable && given
		}
		if !set {
			_ = os.Setenv(variable, value) // fails only for names that are empty or contain "="
		}
	}
}

// warnIgnored lists the unknown variables of Meridio in one line.
func warnIgnored(environ []string, warn io.Writer) {
	var ignored []string
	for _, e := range environ {
		name, _, _ := strings.Cut(e, "=")
		known := slices.ContainsFunc(aliases, func(a cli.Alias) bool { return slices.Contains(a.Names, name) }) ||
			slices.ContainsFunc(withoutEffect, func(n noEffect) bool { return slices.Contains(n.names, name) })
		if strings.HasPrefix(name, "NFE_") && !known {
			ignored = append(ignored, name)
		}
	}
	if len(ignored) > 0 {
		slices.Sort(ignored)
		fmt.Fprintf(warn, "frontend: these variables of Meridio have no effect and are ignored: %s\n",
			strings.Join(ignored, ", "))
	}
}

// arguments rewrites command lines of Meridio's frontend that kong parses differently. Meridio
// uses Go's flag package, which accepts a single dash. Its --debug alone prints a document and
// exits.
func arguments(args []string) []string {
	if len(args) != 1 {
		return args
	}
	switch args[0] {
	case "-debug", "--debug":
		return []string{"debug", "--local"}
	case "-version":
		return []string{"--version"}
	case "-help":
		return []string{"--help"}
	}
	return args
}
