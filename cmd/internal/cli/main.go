package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/alecthomas/kong"
	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/grpclog"

	"github.com/vipgate/vipgate/pkg/health"
	"github.com/vipgate/vipgate/pkg/logs"
)

// Program describes a command line.
type Program struct {
	Name, Description       string
	HealthPort, MetricsPort uint16
	// HealthHost and MetricsHost are the default hosts of --health-address and --metrics-address; if
	// empty: 127.0.0.1. HealthScope describes the addresses in the help of --health-address; if empty:
	// never the external interface.
	HealthHost, MetricsHost, HealthScope string
	// AdminSocket is the path of the admin socket. The default is /run/vipgate/NAME.sock.
	AdminSocket string
	// IdentityCache is the default of --identity-cache.
	IdentityCache string
	// Aliases lists other names of the program's variables.
	Aliases []Alias
	// Options holds options of the parser, such as [Mapper].
	Options []kong.Option

	adopted map[string]string // aliases that the user set, by variable of the program
}

// Globals are the flags that all programs have before any command.
type Globals struct {
	VersionFlag versionFlag `name:"version" help:"Print the version and exit." env:"-"`
}

// Output is the destination of printed text.
type Output struct{ io.Writer }

// Printf prints to the output. It ignores errors, which cannot be reported elsewhere.
func (o *Output) Printf(format string, args ...any) { _, _ = fmt.Fprintf(o, format, args...) }

// New returns the parser of a command line.
func New(p Program, commands any) (*kong.Kong, error) {
	const loopback = "127.0.0.1"
	address := func(host string, port uint16) string {
		return net.JoinHostPort(cmp.Or(host, loopback), strconv.Itoa(int(port)))
	}
	return kong.New(commands, append(p.Options,
		kong.Name(p.Name), kong.Description(p.Description), kong.DefaultEnvars("VIPGATE"), kong.UsageOnError(),
		kong.Vars{
			"health_address": address(p.HealthHost, p.HealthPort), "asked_address": address(loopback, p.HealthPort),
			"metrics_address": address(p.MetricsHost, p.MetricsPort),
			"health_scope":    cmp.Or(p.HealthScope, "never the external interface"),
			"identity_cache":  p.IdentityCache,
			"admin_socket":    "unix://" + cmp.Or(p.AdminSocket, "/run/vipgate/"+p.Name+".sock"),
		},
		kong.ConfigureHelp(kong.HelpOptions{Compact: true, FlagsLast: true}),
		Mapper("a SPIFFE ID such as spiffe://example.org/frontend", spiffeid.FromString),
		Mapper("a trust domain such as example.org", spiffeid.TrustDomainFromString),
		addressMapper(map[string]uint16{"health-address": p.HealthPort, "metrics-address": p.MetricsPort}),
	)...)
}

// gcPercent is the garbage collection target unless the environment sets GOGC. The programs run
// long and allocate little. With a small heap, half of Go's default costs no measurable time and
// saves memory. A decision about all VIPs allocates half of a heap that consists of VIPs, and a
// collection in it costs 4 ms at 10 000 VIPs, so a heap above smallHeap may double.
const gcPercent, manyGCPercent, smallHeap = 50, 100, 6 << 20

// startGCPercent is the target while a program starts. Memory peaks during the start, most of
// which is waiting for BGP sessions. At 10 000 VIPs, 15 instead of 50 saves 10 MiB in frontend
// and 1 MiB in lb, and costs the frontend up to 0.3 s of processor time. lb uses it only until
// the first verdict, because with 10 000 targets it would delay the last verdict by 0.4 s.
const startGCPercent = 15

// CollectOften makes the garbage collector run more often until the returned function is called.
// It does nothing if the environment sets GOGC.
func CollectOften() (end func()) {
	if os.Getenv("GOGC") != "" {
		return func() {}
	}
	debug.SetGCPercent(startGCPercent)
	return func() {
		var memory runtime.MemStats
		runtime.ReadMemStats(&memory)
		percent := gcPercent
		if memory.HeapAlloc > smallHeap {
			percent = manyGCPercent
		}
		debug.SetGCPercent(percent)
	}
}

// grpcLogger returns the logger of gRPC. It discards errors, which the programs report themselves,
// unless gRPC's own variable sets a severity.
func grpcLogger(stderr io.Writer) grpclog.LoggerV2 {
	severities := []string{"info", "warning", "error"}
	outputs := []io.Writer{io.Discard, io.Discard, io.Discard}
	if i := slices.Index(severities, strings.ToLower(os.Getenv("GRPC_GO_LOG_SEVERITY_LEVEL"))); i >= 0 {
		outputs[i] = stderr // also receives the higher severities
	}
	verbosity, _ := strconv.Atoi(os.Getenv("GRPC_GO_LOG_VERBOSITY_LEVEL")) // 0 without a number
	return grpclog.NewLoggerV2WithVerbosity(outputs[0], outputs[1], outputs[2], verbosity)
}

// duplicateStderr returns stderr with another file descriptor. If the pipe has no reader, a write
// to file descriptor 2 makes Go raise SIGPIPE, which ends the process. A write to another
// descriptor only fails, and the pipe may have a reader later.
func duplicateStderr() *os.File {
	fd, err := unix.FcntlInt(os.Stderr.Fd(), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return os.Stderr
	}
	return os.NewFile(uintptr(fd), "stderr")
}

// init locks the main goroutine to the main thread; see [Main].
func init() { runtime.LockOSThread() }

// Main parses the command line, runs the command and returns the exit status. The command runs in
// another thread: the kernel prefers the main thread for SIGTERM, even while that thread is
// blocked in a hung file system.
func Main(ctx context.Context, p Program, commands any, args []string) int {
	status := make(chan int)
	go func() { status <- run(ctx, p, commands, args) }()
	return <-status
}

func run(ctx context.Context, p Program, commands any, args []string) int {
	stderr := logs.NewWriter(duplicateStderr())
	defer stderr.Close()
	grpclog.SetLoggerV2(grpcLogger(stderr))
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
	// Kubernetes sets variables for Services, which unknownVariables would refuse.
	dropServices()
	p.adopted = Adopt(p.Aliases)
	parser, err := New(p, commands)
	if err != nil {
		fmt.Fprintf(stderr, "%s: %v\n", p.Name, err)
		return ExitUsage
	}
	unknown := unknownVariables(Variables(p, parser))
	parsed, err := parse(parser, args)
	// The version must be available in any environment.
	if err == nil && parsed.Command() == "version" {
		unknown = nil
	}
	if err = errors.Join(append(unknown, err)...); err != nil {
		// kong names the variable of the program, and the user may have set its alias.
		message := fromVariable.ReplaceAllStringFunc(err.Error(), func(s string) string {
			return "(from " + p.given(fromVariable.FindStringSubmatch(s)[1]) + "="
		})
		fmt.Fprintf(stderr, "%s: %s\nTry '%s --help'.\n", p.Name, message, p.Name)
		return ExitUsage
	}
	parsed.BindTo(ctx, (*context.Context)(nil))
	parsed.Bind(&Output{os.Stdout}, stderr)
	err = parsed.Run()
	// kong joins the command's error with the error of a hook. Unwrap it if it is the only one.
	if joined, ok := err.(interface{ Unwrap() []error }); ok && len(joined.Unwrap()) == 1 {
		err = joined.Unwrap()[0]
	}
	// Errors of calls contain prefixes of gRPC, which mean nothing to a user.
	err = Explain(err)
	var exit ExitError
	var user *UsageError
	switch {
	case err == nil:
		return ExitOK
	case errors.As(err, &exit):
		return int(exit)
	case errors.As(err, &user):
		fmt.Fprintf(stderr, "%s: %s\n", p.Name, p.nameVariables(parsed, err.Error()))
		return ExitUsage
	}
	fmt.Fprintf(stderr, "%s: %v\n", p.Name, err)
	return ExitFailed
}

// buildVersion is set by the linker to the version of a release.
var buildVersion string

// Version returns the version of the release. In other builds it returns the version that the go
// command derives from the repository, such as v0.1.1-0.20261122050740-878762130f0b.
func Version() string {
	if buildVersion != "" {
		return buildVersion
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	return strings.Trim(info.Main.Version, "()") // (devel) without version control
}

type versionFlag bool

// BeforeReset prints the version before kong validates the command line.
func (versionFlag) BeforeReset(app *kong.Kong) error {
	_, _ = fmt.Fprintln(app.Stdout, Version())
	app.Exit(ExitOK)
	return nil
}

// VersionCommand prints the version.
type VersionCommand struct{}

// Run prints the version.
func (VersionCommand) Run(out *Output) error {
	out.Printf("%s\n", Version())
	return nil
}

// Healthcheck is the command that checks a health service.
type Healthcheck struct {
	Service       string  `help:"Name of the service, such as Readiness or vip/20.0.0.1/32; empty for the whole process." default:"Readiness"`
	HealthAddress Address `help:"Address of the gRPC health service." default:"${asked_address}" placeholder:"ADDR[:PORT]"`
}

// Run returns an error unless the service serves.
func (c *Healthcheck) Run(ctx context.Context, out *Output) error {
	ctx, cancel := context.WithTimeout(ctx, CallTimeout)
	defer cancel()
	err := health.CheckClient(ctx, c.HealthAddress.String(), c.Service)
	if err == nil {
		out.Printf("SERVING\n")
	}
	return err
}

// Exit statuses.
const (
	ExitOK     = 0
	ExitFailed = 1 // the process failed, or a VIP is not in the desired state
	ExitUsage  = 2 // the configuration or the command line was refused
)

// UsageError is an error of the user's configuration, reported with ExitUsage.
type UsageError struct{ error }

// Unwrap returns the cause.
func (e *UsageError) Unwrap() error { return e.error }

// Usage returns a [UsageError].
func Usage(format string, args ...any) error { return &UsageError{fmt.Errorf(format, args...)} }

// ExitError ends a command with an exit status and no message.
type ExitError int

// Error returns the exit status as text.
func (e ExitError) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

// stopMargin bounds the time from SIGTERM to the exit, in addition to the drain time. It covers
// the bounded stages of a stop and the removal of kernel state.
const stopMargin = 30 * time.Second

// RunUntilStopped calls run with a channel that receives a value for each SIGTERM or SIGINT, and
// returns run's error. After the first signal it does not wait for a hung run, so that a signal
// always ends the process.
func RunUntilStopped(drainTime time.Duration, run func(stops <-chan struct{}) error) error {
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	defer signal.Stop(signals)
	err := runUntil(signals, drainTime+stopMargin, run)
	if errors.Is(err, errStopped) {
		return nil
	}
	return err
}

var errStopped = errors.New("stopped during the start")

// Start calls a function of the start, which may hang. A stop does not wait for it.
func Start[T any](stops <-chan struct{}, start func() (T, error)) (result T, err error) {
	ended := make(chan func() (T, error), 1)
	go func() {
		result, err := start()
		ended <- func() (T, error) { return result, err }
	}()
	select {
	case end := <-ended:
		return end()
	case <-stops:
		return result, errStopped
	}
}

func runUntil(signals <-chan os.Signal, limit time.Duration, run func(stops <-chan struct{}) error) error {
	stops := make(chan struct{}, cap(signals))
	ended := make(chan error, 1)
	go func() { ended <- run(stops) }()
	var expired <-chan time.Time
	for {
		select {
		case err := <-ended:
			return err
		case <-signals:
			// A second signal must not extend the time.
			if expired == nil {
				expired = time.After(limit)
			}
			select {
			case stops <- struct{}{}:
			default: // a third signal has the same effect as the second
			}
		case <-expired:
			return fmt.Errorf("still running %v after the first signal: a call of the start or of the cleanup hangs", limit)
		}
	}
}
