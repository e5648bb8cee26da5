package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/vipgate/vipgate/test/lab"
	"github.com/vipgate/vipgate/test/machine"
)

// options are the command line.
type options struct {
	binaries string        // the folder of lb, frontend and target
	interval time.Duration // between two requests for a VIP through a gateway
	// observed is how long requests continue after an incident: a state that lasts until then needs a
	// person, or is the wanted one.
	observed       time.Duration
	reference      bool
	document, json string // the files that get the results
	keep           string // the folder of evidence and logs; "": only of failures, in the current one
}

// The exit status is 1 if a budget was missed or an incident could not be run.
func main() {
	var o options
	chosen := scenarios()
	flag.StringVar(&o.binaries, "binaries", "bin", "`folder` of lb, frontend and target")
	flag.Func("incident", "only these `incidents`, such as I7,I8", func(names string) error {
		chosen = slices.DeleteFunc(chosen, func(s scenario) bool { return !slices.Contains(strings.Split(names, ","), s.ID) })
		if len(chosen) == 0 {
			return errors.New("there is no such incident")
		}
		return nil
	})
	flag.DurationVar(&o.interval, "interval", 20*time.Millisecond, "time between two requests for a VIP through a gateway")
	flag.DurationVar(&o.observed, "observed", 6*time.Second, "how long requests continue after an incident")
	flag.BoolVar(&o.reference, "reference", true, "also run the common pattern: BIRD and a script")
	flag.StringVar(&o.document, "document", "", "`file` in which the table is replaced")
	flag.StringVar(&o.json, "json", "", "`file` for the results as JSON")
	flag.StringVar(&o.keep, "keep", "", "`folder` for evidence and logs of every incident")
	flag.Parse()
	if o.document != "" && len(chosen) < len(scenarios()) {
		fmt.Fprintln(os.Stderr, "replay: --document is the table of one run of all incidents: omit --incident, or --document")
		os.Exit(2)
	}
	if err := o.run(chosen); err != nil {
		fmt.Fprintf(os.Stderr, "replay: %v\n", err)
		os.Exit(1)
	}
}

// run replays incidents and publishes the results.
func (o options) run(chosen []scenario) (err error) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := o.complete(); err != nil {
		return err
	}
	all := report{Machine: machine.Describe(ctx, o.binaries)}
	var missed []string
	for _, s := range chosen {
		r := row{scenario: s, Vipgate: o.replay(ctx, &s, false)}
		if r.Met = r.Vipgate.within(s.Budget); !r.Met {
			missed = append(missed, s.ID)
		}
		if o.reference && s.reference != nil {
			reference := o.replay(ctx, &s, true)
			r.Reference = &reference
		}
		fmt.Print(r)
		all.Rows = append(all.Rows, r)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
	if err = o.publish(all); err == nil && len(missed) > 0 {
		err = fmt.Errorf("missed: %s", strings.Join(missed, ", "))
	}
	return err
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
		_, err := os.Stat(filepath.Join(o.binaries, program))
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
