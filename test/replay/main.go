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
	binaries string // the folder of lb, frontend and target
	chosen   []scenario
	interval time.Duration // between two requests for a VIP through a gateway
	// observed is how long requests continue after an incident: a state that lasts until then needs a
	// person, or is the wanted one.
	observed  time.Duration
	reference bool
	document  string // the file that gets the table
	json      string
	keep      string // the folder of logs; "": only of failures, in the current one
}

func main() {
	o, err := parse(os.Args[1:], os.Stderr)
	if err != nil {
		os.Exit(exitUsage)
	}
	os.Exit(o.run(os.Stdout))
}

func parse(args []string, stderr io.Writer) (options, error) {
	o := options{chosen: scenarios()}
	f := flag.NewFlagSet("replay", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.StringVar(&o.binaries, "binaries", "bin", "`folder` of lb, frontend and target")
	f.Func("incident", "only these `incidents`, such as I7,I8", func(names string) error {
		o.chosen = slices.DeleteFunc(o.chosen, func(s scenario) bool { return !slices.Contains(strings.Split(names, ","), s.ID) })
		if len(o.chosen) == 0 {
			return errors.New("there is no such incident")
		}
		return nil
	})
	f.DurationVar(&o.interval, "interval", 20*time.Millisecond, "time between two requests for a VIP through a gateway")
	f.DurationVar(&o.observed, "observed", 6*time.Second, "how long requests continue after an incident")
	f.BoolVar(&o.reference, "reference", true, "also run the common pattern: BIRD and a script")
	f.StringVar(&o.document, "document", "", "`file` in which the table is replaced")
	f.StringVar(&o.json, "json", "", "`file` for the results as JSON")
	f.StringVar(&o.keep, "keep", "", "`folder` for evidence and logs of every incident")
	return o, f.Parse(args)
}

// run replays the incidents and returns the exit status.
func (o options) run(out io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := o.complete(); err != nil {
		fmt.Fprintf(os.Stderr, "replay: %v\n", err)
		return exitMissed
	}
	var rows []row
	status := exitMet
	for _, s := range o.chosen {
		r := row{scenario: s, Vipgate: o.replay(ctx, &s, false)}
		if r.Met = r.Vipgate.within(s.Budget); !r.Met {
			status = exitMissed
		}
		if o.reference && s.reference != nil {
			reference := o.replay(ctx, &s, true)
			r.Reference = &reference
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
	return status
}

// complete makes the folder absolute and checks that all programs exist.
func (o *options) complete() (err error) {
	errs := lab.Missing()
	if program := lab.MissingForTopology(); program != "" {
		errs = append(errs, errors.New("missing: "+program))
	}
	if o.binaries, err = filepath.Abs(o.binaries); err != nil {
		return err
	}
	for _, program := range []string{"lb", "frontend", "target"} {
		if _, err := os.Stat(filepath.Join(o.binaries, program)); err != nil {
			errs = append(errs, fmt.Errorf("%s is not built in %s: make build", program, o.binaries))
		}
	}
	return errors.Join(errs...)
}
