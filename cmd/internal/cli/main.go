package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
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
	HealthPort, MetricsPort int
	// HealthHost is the default of --health-host, and HealthScope what its help says of addresses;
	// empty: 127.0.0.1, and never the external interface.
	HealthHost, HealthScope string
	// DebugScope is what the help of --debug adds.
	DebugScope string
	// AdminSocket is the path of the admin socket; empty: /run/vipgate/NAME.sock.
	AdminSocket string
	// Aliases are other names of its variables.
	Aliases []Alias
	// Options are options of the parser, such as [Mapper].
	Options []kong.Option

	adopted map[string]string // names of variables that the user set, by those of the program
}

// Globals are the flags that all programs have before any command.
type Globals struct {
	Debug       bool        `help:"Log at level debug${debug_scope}." env:"-"`
	VersionFlag versionFlag `name:"version" help:"Print the version and exit." env:"-"`
}

// Output is where commands print to.
type Output struct{ io.Writer }

// Printf prints. What cannot be written to stdout has nowhere else to go.
func (o *Output) Printf(format string, args ...any) { _, _ = fmt.Fprintf(o, format, args...) }

// New returns the parser of a command line.
func New(p Program, commands any) (*kong.Kong, error) {
	return kong.New(commands, append(p.Options,
		kong.Name(p.Name), kong.Description(p.Description), kong.DefaultEnvars("VIPGATE"), kong.UsageOnError(),
		kong.Vars{
			"health_port": strconv.Itoa(p.HealthPort), "metrics_port": strconv.Itoa(p.MetricsPort),
			"health_host":  cmp.Or(p.HealthHost, "127.0.0.1"),
			"health_scope": cmp.Or(p.HealthScope, "never the external interface"),
			"debug_scope":  p.DebugScope,
			"admin_socket": "unix://" + cmp.Or(p.AdminSocket, "/run/vipgate/"+p.Name+".sock"),
		},
		kong.ConfigureHelp(kong.HelpOptions{Compact: true, FlagsLast: true}),
		Mapper("a SPIFFE ID such as spiffe://example.org/frontend", spiffeid.FromString),
		Mapper("a trust domain such as example.org", spiffeid.TrustDomainFromString),
	)...)
}

// gcPercent is the garbage collection target unless the environment sets GOGC. The programs live
// long and allocate little: half of Go's default costs no measurable time and, at 10 000 VIPs, saves
// a tenth to a fifth of the memory.
const gcPercent = 50

// startGCPercent is the target while a program starts: the peak of its memory is that of the start,
// and most of the start is waiting for BGP sessions. At 10 000 VIPs 15 in place of 50 saves 10
// MiB of frontend and 1 of lb, and takes the frontend up to 0.3 s more of processor time. In lb it
// ends before the first verdict: with 10 000 targets it would take 0.4 s more until the last.
const startGCPercent = 15

// CollectOften has garbage collected more often from now on, until the returned function is
// called. It does nothing if the environment sets GOGC.
func CollectOften() (end func()) {
	if os.Getenv("GOGC") != "" {
		return func() {}
	}
	debug.SetGCPercent(startGCPercent)
	return func() { debug.SetGCPercent(gcPercent) }
}

// grpcLogger returns the logger of gRPC. It discards errors, which the programs report themselves,
// unless gRPC's own variable has a severity.
func grpcLogger(stderr io.Writer) grpclog.LoggerV2 {
	severities := []string{"info", "warning", "error"}
	outputs := []io.Writer{io.Discard, io.Discard, io.Discard}
	if i := slices.Index(severities, strings.ToLower(os.Getenv("GRPC_GO_LOG_SEVERITY_LEVEL"))); i >= 0 {
		outputs[i] = stderr // of the higher severities, too
	}
	verbosity, _ := strconv.Atoi(os.Getenv("GRPC_GO_LOG_VERBOSITY_LEVEL")) // 0 without a number
	return grpclog.NewLoggerV2WithVerbosity(outputs[0], outputs[1], outputs[2], verbosity)
}

// duplicateStderr returns stderr with another file descriptor. Go raises SIGPIPE, which ends the
// process, after a write to file descriptor 2 whose pipe has no reader. With another one the write
// fails, and the pipe may have a reader later.
func duplicateStderr() *os.File {
	fd, err := unix.FcntlInt(os.Stderr.Fd(), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return os.Stderr
	}
	return os.NewFile(uintptr(fd), "stderr")
}

// The main goroutine keeps the main thread, see [Main].
func init() { runtime.LockOSThread() }

// Main parses the command line, runs the command and returns the exit status. The command gets
// another thread: the kernel delivers SIGTERM to the main thread, and to that one only while it is
// blocked in a file system that hangs.
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
	dropServices()
	p.adopted = Adopt(p.Aliases)
	parser, err := New(p, commands)
	if err != nil {
		fmt.Fprintf(stderr, "%s: %v\n", p.Name, err)
		return ExitUsage
	}
	unknown := unknownVariables(Variables(p, parser))
	parsed, err := parse(parser, args)
	if err == nil && parsed.Command() == "version" {
		unknown = nil
	}
	if err = errors.Join(append(unknown, err)...); err != nil {
		message := fromVariable.ReplaceAllStringFunc(err.Error(), func(s string) string {
			return "(from " + p.given(fromVariable.FindStringSubmatch(s)[1]) + "="
		})
		fmt.Fprintf(stderr, "%s: %s\nTry '%s --help'.\n", p.Name, message, p.Name)
		return ExitUsage
	}
	parsed.BindTo(ctx, (*context.Context)(nil))
	parsed.Bind(&Output{os.Stdout}, stderr)
	err = parsed.Run()
	// kong joins it with the error of a hook.
	if joined, ok := err.(interface{ Unwrap() []error }); ok && len(joined.Unwrap()) == 1 {
		err = joined.Unwrap()[0]
	}
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

// Version is the version of the program: that of the release, else the one that
// the go command derives from the repository, such as
// v0.1.1-0.20261122050740-878762130f0b.
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

// BeforeReset prints the version before anything else is looked at.
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

// Healthcheck asks a health service.
type Healthcheck struct {
	Service    string `help:"Name of the service, such as Readiness or vip/20.0.0.1/32; empty for the whole process." default:"Readiness"`
	HealthHost string `help:"Address of the gRPC health service." default:"127.0.0.1" placeholder:"ADDR"`
	HealthPort uint16 `help:"Port of the gRPC health service." default:"${health_port}" placeholder:"PORT"`
}

// Run returns an error unless the service serves.
func (c *Healthcheck) Run(ctx context.Context, out *Output) error {
	ctx, cancel := context.WithTimeout(ctx, CallTimeout)
	defer cancel()
	err := health.CheckClient(ctx, address(c.HealthHost, c.HealthPort), c.Service)
	if err == nil {
		out.Printf("SERVING\n")
	}
	return err
}

// Exit statuses.
const (
	ExitOK     = 0
	ExitFailed = 1 // the process failed, or a VIP is not as desired
	ExitUsage  = 2 // the configuration or the command line was refused
)

// UsageError is an error of the user's configuration, reported with ExitUsage.
type UsageError struct{ error }

// Unwrap returns the cause.
func (e *UsageError) Unwrap() error { return e.error }

// Usage returns a [UsageError].
func Usage(format string, args ...any) error { return &UsageError{fmt.Errorf(format, args...)} }

// ExitError ends a command with a status and without a message.
type ExitError int

// Error names the status.
func (e ExitError) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

// stopMargin is how long a program may take to end after SIGTERM beyond its drain
// time: the bounded stages of its stop, and the removal of what it leaves.
const stopMargin = 30 * time.Second

// RunUntilStopped calls run with a channel that gets a value for each SIGTERM or SIGINT, and
// returns its error. It does not wait for a run that hangs after the first signal: a
// signal always ends the process.
func RunUntilStopped(drainTime time.Duration, run func(stops <-chan struct{}) error) error {
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	defer signal.Stop(signals)
	return runUntil(signals, drainTime+stopMargin, run)
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
			if expired == nil {
				expired = time.After(limit)
			}
			select {
			case stops <- struct{}{}:
			default: // a third signal means what the second did
			}
		case <-expired:
			return fmt.Errorf("still running %v after the first signal: a call of the start or of the cleanup hangs", limit)
		}
	}
}
