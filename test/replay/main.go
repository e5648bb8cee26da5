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
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/vipgate/vipgate/test/lab"
)

// Exit statuses.
const (
	exitMet    = 0
	exitMissed = 1 // a budget was missed, or an incident could not be run
	exitUsage  = 2
)

// options are the command line.
type options struct {
	binaries  string // the folder of lb, frontend and target
	incidents []string
	interval  time.Duration // between two requests for a VIP through a gateway
	// observed is how long requests continue after an incident: a state that lasts until then needs a
	// person, or is the wanted one.
	observed  time.Duration
	reference bool
	document  string // the file that gets the table
	json      string
	keep      string // the folder that gets logs
}

func main() {
	o, err := parse(os.Args[1:], os.Stderr)
	if err != nil {
		os.Exit(exitUsage)
	}
	os.Exit(run(o, os.Stdout))
}

func parse(args []string, stderr io.Writer) (options, error) {
	var o options
	var names string
	f := flag.NewFlagSet("replay", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.StringVar(&o.binaries, "binaries", "bin", "`folder` of lb, frontend and target")
	f.StringVar(&names, "incident", "", "only these `incidents`, such as I7,I8")
	f.DurationVar(&o.interval, "interval", 20*time.Millisecond, "time between two requests for a VIP through a gateway")
	f.DurationVar(&o.observed, "observed", 6*time.Second, "how long requests continue after an incident")
	f.BoolVar(&o.reference, "reference", true, "also run the common pattern: BIRD and a script")
	f.StringVar(&o.document, "document", "", "`file` in which the table is replaced")
	f.StringVar(&o.json, "json", "", "`file` for the results as JSON")
	f.StringVar(&o.keep, "keep", "", "`folder` for the ends of all logs")
	if err := f.Parse(args); err != nil {
		return o, err
	}
	if names != "" {
		o.incidents = strings.Split(names, ",")
	}
	known := func(id string) bool {
		return slices.ContainsFunc(scenarios(), func(s scenario) bool { return s.id == id })
	}
	for _, id := range o.incidents {
		if !known(id) {
			fmt.Fprintf(stderr, "replay: there is no incident %q\n", id)
			return o, errors.New("usage")
		}
	}
	return o, nil
}

// run replays the incidents and returns the exit status.
func run(o options, out io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := o.complete(); err != nil {
		fmt.Fprintf(os.Stderr, "replay: %v\n", err)
		return exitMissed
	}
	var rows []row
	for _, s := range scenarios() {
		if len(o.incidents) > 0 && !slices.Contains(o.incidents, s.id) {
			continue
		}
		r := row{scenario: s, result: replay(ctx, o, &s, false)}
		if o.reference && s.reference != nil {
			reference := replay(ctx, o, &s, true)
			r.reference = &reference
		}
		fmt.Fprint(out, r)
		rows = append(rows, r)
		if ctx.Err() != nil {
			return exitMissed
		}
	}
	if err := o.publish(rows); err != nil {
		fmt.Fprintf(os.Stderr, "replay: %v\n", err)
		return exitMissed
	}
	if slices.ContainsFunc(rows, func(r row) bool { return !r.met() }) {
		return exitMissed
	}
	return exitMet
}

// complete makes paths absolute and checks that all programs exist.
func (o *options) complete() error {
	errs := lab.Missing()
	if program := lab.MissingForTopology(); program != "" {
		errs = append(errs, errors.New("missing: "+program))
	}
	dir, err := filepath.Abs(o.binaries)
	o.binaries = dir
	errs = append(errs, err)
	for _, program := range []string{"lb", "frontend", "target"} {
		if _, err := os.Stat(filepath.Join(dir, program)); err != nil {
			errs = append(errs, fmt.Errorf("%s is not built in %s: make build", program, dir))
		}
	}
	return errors.Join(errs...)
}
