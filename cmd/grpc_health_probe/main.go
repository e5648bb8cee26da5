// Command grpc_health_probe checks a gRPC health service for the exec probes of Meridio's pods.
// It has the flags and exit statuses of the program with the same name in Meridio's images.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/vipgate/vipgate/pkg/health"
)

// Exit statuses.
const (
	serving = iota
	invalidArguments
	unreachable
	callFailed
	notServing
)

func main() { os.Exit(run(context.Background(), os.Args[1:], os.Stdout, os.Stderr)) }

// run returns the exit status.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	flags := flag.NewFlagSet("grpc_health_probe", flag.ContinueOnError)
	flags.SetOutput(stderr)
	addr := flags.String("addr", "", "address of the health service: host:port, or unix:///path (required)")
	service := flags.String("service", "", "name of the service; empty: the process")
	connect := flags.Duration("connect-timeout", time.Second, "limit for the connection")
	call := flags.Duration("rpc-timeout", time.Second, "limit for the call")
	err := flags.Parse(args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return serving
	case err != nil: // the flag set has printed it
		return invalidArguments
	case *addr == "":
		return refuse(stderr, "-addr is required, such as -addr=unix:///tmp/health.sock")
	case flags.NArg() > 0:
		return refuse(stderr, "unexpected arguments: "+strings.Join(flags.Args(), " "))
	case *connect <= 0 || *call <= 0:
		return refuse(stderr, "-connect-timeout and -rpc-timeout must be greater than 0")
	}
	err = health.Probe(ctx, *addr, *service, *connect, *call)
	if err == nil {
		// If the output has no reader, the exit status still reports the result.
		_, _ = fmt.Fprintln(stdout, "status: SERVING")
		return serving
	}
	_, _ = fmt.Fprintf(stderr, "error: %v\n", err)
	switch {
	case errors.Is(err, health.ErrUnreachable):
		return unreachable
	case errors.Is(err, health.ErrNotServing):
		return notServing
	}
	return callFailed
}

func refuse(stderr io.Writer, text string) int {
	_, _ = fmt.Fprintf(stderr, "error: %s\n", text)
	return invalidArguments
}
