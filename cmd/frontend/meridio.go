package main

import (
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/vipgate/vipgate/cmd/internal/cli"
)

// alias is one variable of Meridio that we honour.
type alias struct {
	meridio []string // more than one where its code and its documentation differ
	ours    string   // without VIPGATE_
	convert func(string) (string, error)
}

// aliases are the variables of Meridio's frontend (docs/configuration.md), and that of Meridio 2's
// router for the directory of readiness files.
var aliases = []alias{
	{[]string{"NFE_EXTERNAL_INTERFACE"}, "EXTERNAL_INTERFACE", same},
	{[]string{"NFE_BIRD_CONFIG_PATH"}, "BIRD_DIR", same},
	{[]string{"NFE_BIRD_COMMUNICATION_SOCK"}, "BIRD_SOCKET", same},
	{[]string{"NFE_BIRD_LOG_FILE_SIZE"}, "BIRD_LOG_FILE_SIZE", same},
	{[]string{"NFE_BIRD_KERNEL_SCAN_TIME", "NFE_BIRD_SCAN_TIME"}, "BIRD_KERNEL_SCAN_TIME", seconds},
	{[]string{"NFE_LOCAL_AS"}, "LOCAL_AS", same},
	{[]string{"NFE_REMOTE_AS"}, "REMOTE_AS", same},
	{[]string{"NFE_BGP_LOCAL_PORT"}, "BGP_LOCAL_PORT", same},
	{[]string{"NFE_BGP_REMOTE_PORT"}, "BGP_REMOTE_PORT", same},
	{[]string{"NFE_BGP_HOLD_TIME"}, "BGP_HOLD_TIME", seconds},
	{[]string{"NFE_TABLE_ID"}, "TABLE_ID", same},
	{[]string{"NFE_ECMP"}, "ECMP", same},
	{[]string{"NFE_DROP_IF_NO_PEER"}, "DROP_IF_NO_PEER", same},
	{[]string{"NFE_LOG_BIRD"}, "LOG_BIRD", same},
	{[]string{"NFE_LOG_LEVEL"}, "LOG_LEVEL", level},
	{[]string{"NFE_GRPC_MAX_BACKOFF"}, "MAX_BACKOFF", same},
	{[]string{"NFE_METRICS_PORT"}, "METRICS_PORT", same},
	{[]string{"NFE_METRICS_ENABLED"}, "METRICS_ENABLED", same},
	{[]string{"NFE_LB_SOCKET"}, "LB_SOCKET", same},
	{[]string{"MERIDIO_READINESS_DIR"}, "READINESS_DIR", same},
}

const (
	meridioPrefix = "NFE_"
	ourPrefix     = "VIPGATE_"
)

// adoptMeridio gives our variables the values of Meridio's, unless ours are
// set, and names those that mean nothing yet in one line. It returns the names that
// were adopted, by ours.
func adoptMeridio(lookup func(string) (string, bool), set func(string, string) error, environ []string, warn io.Writer) (map[string]string, error) {
	known, adopted := map[string]bool{}, map[string]string{}
	for _, a := range aliases {
		for _, name := range a.meridio {
			known[name] = true
			value, given := lookup(name)
			if _, ours := lookup(ourPrefix + a.ours); !given || ours {
				continue
			}
			converted, err := a.convert(value)
			if err != nil {
				return nil, &cli.UsageError{Err: fmt.Errorf("environment variable %s=%q: %w", name, value, err)}
			}
			if err := set(ourPrefix+a.ours, converted); err != nil {
				return nil, fmt.Errorf("set %s%s: %w", ourPrefix, a.ours, err)
			}
			adopted[ourPrefix+a.ours] = name
		}
	}
	var ignored []string
	for _, e := range environ {
		name, _, _ := strings.Cut(e, "=")
		if strings.HasPrefix(name, meridioPrefix) && !known[name] {
			ignored = append(ignored, name)
		}
	}
	if len(ignored) > 0 {
		slices.Sort(ignored)
		fmt.Fprintf(warn, "frontend: these variables of Meridio mean nothing here yet and are ignored: %s\n", strings.Join(ignored, ", "))
	}
	return adopted, nil
}

func same(s string) (string, error) { return s, nil }

// seconds takes Meridio's bare seconds, and durations.
func seconds(s string) (string, error) {
	if n, err := strconv.ParseUint(s, 10, 32); err == nil {
		return fmt.Sprintf("%ds", n), nil
	}
	return s, nil
}

// level takes Meridio's upper-case levels; its TRACE is our debug.
func level(s string) (string, error) {
	l := strings.ToLower(s)
	if l == "trace" {
		l = "debug"
	}
	return l, nil
}
