package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/vipgate/vipgate/test/lab"
)

// Exit statuses.
const (
	exitPassed = 0
	exitFailed = 1
	exitUsage  = 2
)

// options are the command line.
type options struct {
	binaries               string // the folder of lb and frontend
	faults                 int
	seed                   uint64
	json                   string // file of the summary
	document               string // gets the results of from
	from                   []string
	plan                   bool   // only print the schedule
	kinds                  string // a regular expression of names
	external               bool   // the speaker is an FRR instead of the frontend's BIRD
	lbFlags, frontendFlags []string
}

func main() {
	o, err := parse(os.Args[1:], os.Stderr)
	if err != nil {
		os.Exit(exitUsage)
	}
	os.Exit(start(o))
}

// words is a flag that can be repeated.
type words []string

func (w *words) String() string     { return strings.Join(*w, " ") }
func (w *words) Set(s string) error { *w = append(*w, s); return nil }

func parse(args []string, stderr io.Writer) (options, error) {
	var o options
	f := flag.NewFlagSet("chaos", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.StringVar(&o.binaries, "binaries", "bin", "`folder` of lb and frontend")
	f.IntVar(&o.faults, "faults", 500, "`number` of faults")
	f.Uint64Var(&o.seed, "seed", 0, "what the faults follow from; 0 draws one")
	f.StringVar(&o.json, "json", "", "write the summary to this `file`")
	f.StringVar(&o.document, "document", "", "inject nothing: write the results of --from into this `file`")
	f.Var((*words)(&o.from), "from", "a `file` of an earlier --json; repeatable")
	f.BoolVar(&o.plan, "plan", false, "print what a seed means, and do nothing")
	f.StringVar(&o.kinds, "kinds", "", "only faults whose name matches this `pattern`")
	f.Func("speaker", "bird (default), or frr: Debian's FRR with frontend run --speaker=external", func(s string) error {
		o.external = s == "frr"
		if !o.external && s != "bird" {
			return errors.New("expected bird or frr")
		}
		return nil
	})
	f.Var((*words)(&o.lbFlags), "lb-flag", "another `flag` for lb run; repeatable")
	f.Var((*words)(&o.frontendFlags), "frontend-flag",
		"another `flag` for frontend run, such as one with which this must fail; repeatable")
	if err := f.Parse(args); err != nil {
		return o, err
	}
	if f.NArg() > 0 || o.faults < 1 {
		fmt.Fprintf(stderr, "chaos: unexpected argument or no fault at all\n")
		return o, errors.New("usage")
	}
	if _, err := regexp.Compile(o.kinds); err != nil || len(o.catalog()) == 0 {
		fmt.Fprintf(stderr, "chaos: --kinds=%s is no pattern of any fault\n", o.kinds)
		return o, errors.New("usage")
	}
	for o.seed == 0 {
		o.seed = rand.Uint64N(1_000_000_000)
	}
	return o, nil
}

// catalog returns the kinds of faults that may be drawn.
func (o options) catalog() []*kind {
	pattern := regexp.MustCompile(o.kinds)
	all := catalog()
	if o.external {
		all = externalCatalog()
	}
	return slices.DeleteFunc(all, func(k *kind) bool { return !pattern.MatchString(k.Name) })
}

// start runs the program and returns the exit status.
func start(o options) int {
	if o.plan {
		printPlan(o)
		return exitPassed
	}
	if o.document != "" {
		if err := publish(o.document, o.from); err != nil {
			fmt.Fprintf(os.Stderr, "chaos: %v\n", err)
			return exitFailed
		}
		return exitPassed
	}
	if err := o.complete(); err != nil {
		fmt.Fprintf(os.Stderr, "chaos: %v\n", err)
		return exitFailed
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer signal.Stop(signals)
	// SIGPIPE from a closed output must not end the run while the lab exists. Child processes would
	// inherit an ignored signal, so it is caught in a channel without a reader.
	pipes := make(chan os.Signal, 1)
	signal.Notify(pipes, syscall.SIGPIPE)
	defer signal.Stop(pipes)
	done := make(chan struct{})
	go func() {
		defer close(done)
		select {
		case s := <-signals:
			cancel(fmt.Errorf("interrupted (%v)", s))
		case <-ctx.Done():
		}
	}()
	out := &printer{w: os.Stdout}
	err := run(ctx, o, out)
	cancel(nil)
	<-done
	if err != nil {
		out.printf("")
		out.printf("FAILED: %v", err)
		out.printf("seed %d; again: %s", o.seed, o.again())
		return exitFailed
	}
	out.printf("")
	out.printf("PASSED with seed %d", o.seed)
	if out.err != nil {
		return exitFailed
	}
	return exitPassed
}

// again returns the command line that repeats the run.
func (o options) again() string {
	command := fmt.Sprintf("make chaos FAULTS=%d SEED=%d", o.faults, o.seed)
	speaker := ""
	if o.external {
		command, speaker = command+" SPEAKER=frr", " --speaker=frr"
	}
	kinds := words{o.kinds}
	if o.kinds == "" {
		kinds = nil
	}
	if len(o.lbFlags)+len(o.frontendFlags)+len(kinds) > 0 {
		command = fmt.Sprintf("%s --binaries=%s --faults=%d --seed=%d%s", os.Args[0], o.binaries, o.faults, o.seed, speaker)
		for _, flags := range []struct {
			name   string
			values []string
		}{{"lb-flag", o.lbFlags}, {"frontend-flag", o.frontendFlags}, {"kinds", kinds}} {
			for _, value := range flags.values {
				command += fmt.Sprintf(" --%s=%q", flags.name, value)
			}
		}
	}
	return command
}

// complete makes paths absolute and returns an error that names the missing programs.
func (o *options) complete() error {
	if os.Geteuid() != 0 {
		return errors.New("network namespaces need root: run as root, or with sudo")
	}
	abs, err := filepath.Abs(o.binaries)
	if err != nil {
		return err
	}
	o.binaries = abs
	errs := lab.Missing()
	if lacks := lab.MissingForFRR(); lacks != "" {
		errs = append(errs, errors.New(lacks))
	}
	for _, program := range []string{"lb", "frontend"} {
		if _, err := os.Stat(filepath.Join(o.binaries, program)); err != nil {
			errs = append(errs, fmt.Errorf("%s is not built in %s: make build", program, o.binaries))
		}
	}
	return errors.Join(errs...)
}

func printPlan(o options) {
	var total time.Duration
	for _, g := range plan(o.seed, o.faults, o.catalog()) {
		fmt.Printf("group %d: %s\n", g.Number, g.what())
		for _, f := range g.Faults {
			fmt.Printf("  %4d at %-6s for %-6s %s\n", f.ID, short(f.Start), short(f.Duration), f)
		}
		total += g.length()
	}
	fmt.Printf("%s without calm points\n", short(total))
}
