package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/vipgate/vipgate/test/lab"
)

// Exit statuses.
const (
	exitHeld   = 0 // every step held
	exitFailed = 1
	exitUsage  = 2
)

// options are the command line.
type options struct {
	binaries string        // the folder of lb and frontend
	tools    string        // the folder of grpcurl
	hold     bool          // leave it running after the last step
	pause    time.Duration // to read each table, and to see that it stays
	act      int           // 1 to 3; 0 for all
}

func main() {
	o, err := parse(os.Args[1:], os.Stderr)
	if err != nil {
		os.Exit(exitUsage)
	}
	os.Exit(run(o))
}

func parse(args []string, stderr io.Writer) (options, error) {
	var o options
	f := flag.NewFlagSet("demo", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.StringVar(&o.binaries, "binaries", "bin", "`folder` of lb and frontend")
	f.StringVar(&o.tools, "tools", "", "`folder` of grpcurl (default: tools in --binaries)")
	f.BoolVar(&o.hold, "hold", false, "leave everything running after the last step, until Ctrl-C")
	f.DurationVar(
		&o.pause, "pause", 2500*time.Millisecond, "how long each table is left to be read, and must stay as it is",
	)
	f.IntVar(&o.act, "act", 0, "1 for advertisements, 2 for real traffic, 3 for a rollout (default: all)")
	if err := f.Parse(args); err != nil {
		return o, err
	}
	if o.act < 0 || o.act > 3 {
		fmt.Fprintf(stderr, "demo: there is no act %d: 1 is about advertisements, 2 about real traffic, 3 about a rollout\n",
			o.act)
		return o, errors.New("usage")
	}
	if f.NArg() > 0 {
		fmt.Fprintf(stderr, "demo: unexpected argument %q\n", f.Arg(0))
		return o, errors.New("usage")
	}
	return o, nil
}

// run runs the demo and returns the exit status.
func run(o options) int {
	if err := o.complete(); err != nil {
		fmt.Fprintf(os.Stderr, "demo: %v\n", err)
		return exitFailed
	}
	signals := newSignals()
	defer signals.close()
	out := &printer{w: os.Stdout}
	if err := play(o, out, signals); err != nil {
		out.printf("")
		out.printf("FAILED: %v", err)
		return exitFailed
	}
	return exitHeld
}

// complete makes the paths absolute and returns an error that names the missing programs, a line
// each.
func (o *options) complete() error {
	if os.Geteuid() != 0 {
		return errors.New("network namespaces need root: run as root, or with sudo")
	}
	if o.tools == "" {
		o.tools = filepath.Join(o.binaries, "tools")
	}
	var errs []error
	for _, dir := range []*string{&o.binaries, &o.tools} {
		abs, err := filepath.Abs(*dir)
		if err != nil {
			errs = append(errs, err)
		}
		*dir = abs
	}
	for _, program := range []string{"lb", "frontend", "target", "vipgate-probe"} {
		if _, err := os.Stat(filepath.Join(o.binaries, program)); err != nil {
			errs = append(errs, fmt.Errorf("%s is not built in %s: make build", program, o.binaries))
		}
	}
	if _, err := os.Stat(filepath.Join(o.tools, "grpcurl")); err != nil {
		errs = append(errs, fmt.Errorf("grpcurl is not built in %s: make demo builds it", o.tools))
	}
	if lack := lab.MissingForTopology(); lack != "" && o.act != 1 {
		errs = append(errs, fmt.Errorf("this machine lacks %s", lack))
	}
	return errors.Join(append(errs, lab.Missing()...)...)
}

// play plays the acts.
func play(o options, out *printer, signals *signals) error {
	start := time.Now()
	if o.act <= 1 {
		if err := playFirst(o, out, signals); err != nil {
			return err
		}
	}
	for i, create := range []func(*printer, options) *trafficScenario{secondScenario, thirdScenario} {
		if o.act != i+2 && (o.act != 0 || o.hold) {
			continue
		}
		ctx, release := signals.phase(context.Background())
		err := create(out, o).run(ctx)
		release()
		if err != nil {
			return err
		}
	}
	out.printf("")
	out.printf("Every step held. Cleared up: no namespace, process or file is left. (%s)", short(time.Since(start)))
	return out.err
}

// playFirst creates the fixture, runs the steps, and always closes the fixture.
func playFirst(o options, out *printer, signals *signals) (err error) {
	base, fail := context.WithCancelCause(context.Background())
	defer fail(nil)
	ctx, release := signals.phase(base)
	defer release()
	s, err := newFixture(ctx, o.binaries, fail)
	if err != nil {
		return err
	}
	defer func() {
		if closeErr := s.close(); closeErr != nil {
			err = errors.Join(err, fmt.Errorf("clearing up: %w", closeErr))
		}
	}()
	t := &scenario{fixture: s, printer: out, options: o}
	t.printIntroduction()
	if err := t.runSteps(ctx, t.steps()); err != nil {
		return err
	}
	release()
	if o.hold {
		again, err := t.hold(signals.next())
		if err != nil || !again {
			return err
		}
	}
	ctx, release = signals.phase(base)
	defer release()
	return t.runSteps(ctx, []step{t.lastStep()})
}

// signals delivers the requests to end. Without it, Ctrl-C in a terminal would end the demo
// without removing the lab.
type signals struct {
	c     chan os.Signal
	pipes chan os.Signal
}

func newSignals() *signals {
	s := &signals{c: make(chan os.Signal, 1), pipes: make(chan os.Signal, 1)}
	signal.Notify(s.c, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	// A reader that goes away, such as head, must not end the demo with SIGPIPE: the failed write
	// returns an error. No goroutine reads this channel.
	signal.Notify(s.pipes, syscall.SIGPIPE)
	return s
}

// next gets a value for each request.
func (s *signals) next() <-chan os.Signal { return s.c }

// phase returns a context that the next request cancels. The returned function cancels it, too,
// and can be called twice.
func (s *signals) phase(ctx context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		select {
		case sig := <-s.c:
			cancel(fmt.Errorf("interrupted (%v)", sig))
		case <-ctx.Done():
		}
	}()
	return ctx, func() { cancel(nil); <-done }
}

func (s *signals) close() {
	signal.Stop(s.c)
	signal.Stop(s.pipes)
}
