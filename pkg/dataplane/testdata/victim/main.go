// Command victim runs a data plane until it is as wanted. Built with the tag
// vipgate_faults it kills itself at a step on demand.
//
//	victim STATE-DIR WANTED-FILE
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane"
	"github.com/vipgate/vipgate/pkg/task"
)

func main() {
	if err := run(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(dir, file string) error {
	b, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var desired dataplane.Desired
	if err := json.Unmarshal(b, &desired); err != nil {
		return err
	}
	p, err := dataplane.New(dataplane.Options{StateDir: dir, Log: slog.New(slog.NewTextHandler(os.Stderr, nil))})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- task.Guard(ctx, p.String(), p.Run) }()
	p.Configure(&desired)
	err = settle(ctx, p, desired.Revision)
	cancel()
	if runErr := <-done; err == nil {
		err = runErr
	}
	return err
}

// settle waits until all is confirmed and nothing drains any more.
func settle(ctx context.Context, p *dataplane.Plane, revision uint64) error {
	for {
		s, changed := p.State().Get()
		if s.Revision == revision && s.Err == nil && len(s.Problems) == 0 {
			slots, err := p.Targets(ctx)
			if err != nil {
				return err
			}
			busy := false
			for _, slot := range slots {
				busy = busy || !slot.DrainEnd.IsZero() || slot.State == "pending" || slot.State == "removing"
			}
			if !busy {
				return nil
			}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w; last state: %+v", ctx.Err(), s)
		case <-changed:
		case <-time.After(20 * time.Millisecond):
		}
	}
}
