package main

import (
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/vipgate/vipgate/cmd/internal/cli"
)

// aliases maps the variables of Meridio's frontend (docs/meridio.md), with two names where
// its code and its documentation differ.
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
	meridio("VIPGATE_METRICS_ADDRESS", func(port string) string { return "0.0.0.0:" + port }, "NFE_METRICS_PORT"),
	meridio("VIPGATE_METRICS_ENABLED", nil, "NFE_METRICS_ENABLED"),
	meridio("VIPGATE_LB_SOCKET", nil, "NFE_LB_SOCKET"),
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
	{[]string{"NFE_DROP_IF_NO_PEER"}, "VIP traffic is dropped while no gateway is up, also with `false`"},
	{[]string{"NFE_CONFIG_MAP_NAME"}, "the operator sets it for older frontends; the NSP has the configuration"},
}

func seconds(s string) string {
	// Meridio's value is a number of seconds; vipgate also accepts a duration.
	if _, err := strconv.ParseUint(s, 10, 32); err == nil {
		return s + "s"
	}
	return s
}

// level converts Meridio's log levels. TRACE becomes debug, an unknown level info, as in Meridio.
func level(s string) string {
	switch l := strings.ToLower(s); l {
	case "trace":
		return "debug"
	case "debug", "info", "warn", "error":
		return l
	}
	return "info"
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
		// The order of the environment is arbitrary.
		slices.Sort(ignored)
		fmt.Fprintf(warn, "frontend: these variables of Meridio have no effect and are ignored: %s\n",
			strings.Join(ignored, ", "))
	}
}
