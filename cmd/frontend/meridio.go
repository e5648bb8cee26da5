package main

import (
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/vipgate/vipgate/cmd/internal/cli"
)

// aliases are the variables of Meridio's frontend (docs/configuration.md), two where its code and
// its documentation differ, and that of Meridio 2's router for the directory of readiness files.
var aliases = []cli.Alias{
	cli.Renamed("VIPGATE_EXTERNAL_INTERFACE", "NFE_EXTERNAL_INTERFACE"),
	cli.Renamed("VIPGATE_BIRD_DIR", "NFE_BIRD_CONFIG_PATH"),
	cli.Renamed("VIPGATE_BIRD_SOCKET", "NFE_BIRD_COMMUNICATION_SOCK"),
	cli.Renamed("VIPGATE_BIRD_LOG_FILE_SIZE", "NFE_BIRD_LOG_FILE_SIZE"),
	{
		Names: []string{"NFE_BIRD_KERNEL_SCAN_TIME", "NFE_BIRD_SCAN_TIME"}, Variable: "VIPGATE_BIRD_KERNEL_SCAN_TIME",
		Convert: seconds,
	},
	cli.Renamed("VIPGATE_LOCAL_AS", "NFE_LOCAL_AS"),
	cli.Renamed("VIPGATE_REMOTE_AS", "NFE_REMOTE_AS"),
	cli.Renamed("VIPGATE_BGP_LOCAL_PORT", "NFE_BGP_LOCAL_PORT"),
	cli.Renamed("VIPGATE_BGP_REMOTE_PORT", "NFE_BGP_REMOTE_PORT"),
	{Names: []string{"NFE_BGP_HOLD_TIME"}, Variable: "VIPGATE_BGP_HOLD_TIME", Convert: seconds},
	cli.Renamed("VIPGATE_TABLE_ID", "NFE_TABLE_ID"),
	cli.Renamed("VIPGATE_ECMP", "NFE_ECMP"),
	cli.Renamed("VIPGATE_DROP_IF_NO_PEER", "NFE_DROP_IF_NO_PEER"),
	cli.Renamed("VIPGATE_LOG_BIRD", "NFE_LOG_BIRD"),
	{Names: []string{"NFE_LOG_LEVEL"}, Variable: "VIPGATE_LOG_LEVEL", Convert: level},
	cli.Renamed("VIPGATE_MAX_BACKOFF", "NFE_GRPC_MAX_BACKOFF"),
	cli.Renamed("VIPGATE_METRICS_PORT", "NFE_METRICS_PORT"),
	cli.Renamed("VIPGATE_METRICS_ENABLED", "NFE_METRICS_ENABLED"),
	cli.Renamed("VIPGATE_LB_SOCKET", "NFE_LB_SOCKET"),
	cli.Renamed("VIPGATE_READINESS_DIR", "MERIDIO_READINESS_DIR"),
}

func seconds(s string) string {
	if _, err := strconv.ParseUint(s, 10, 32); err == nil {
		return s + "s"
	}
	return s
}

// level converts Meridio's upper-case levels; its TRACE is debug.
func level(s string) string { return strings.Replace(strings.ToLower(s), "trace", "debug", 1) }

// warnIgnored names in one line the variables of Meridio that have no effect.
func warnIgnored(environ []string, warn io.Writer) {
	var ignored []string
	for _, e := range environ {
		name, _, _ := strings.Cut(e, "=")
		known := slices.ContainsFunc(aliases, func(a cli.Alias) bool { return slices.Contains(a.Names, name) })
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
