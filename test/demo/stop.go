package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"syscall"
	"time"

	"github.com/vipgate/vipgate/test/lab"
)

// lastStep returns the end of the pod.
func (t *scenario) lastStep() step {
	return step{"SIGTERM to the whole pod: 65535:0, then the withdrawal, then the load balancer goes", t.stopPod}
}

// stopPod ends lb and frontend in the same instant and checks the order of the effects.
func (t *scenario) stopPod(ctx context.Context) error {
	before := t.watcher.Last()
	lb, frontend := t.pod.LB, t.pod.Frontend
	t.expectExit(lb, frontend)
	t.printf("   kill -TERM %d %d (lb and frontend, in the same instant)", lb.PID(), frontend.PID())
	from := time.Now()
	if err := errors.Join(lb.Signal(syscall.SIGTERM), frontend.Signal(syscall.SIGTERM)); err != nil {
		return err
	}
	ctx, cancel := withTimeout(ctx)
	defer cancel()
	warned, err := t.watcher.Wait(ctx, depreferred(before.Prefixes()))
	if err != nil {
		return err
	}
	t.printf("   after %s the gateway receives the de-preferred routes:", short(warned.At.Sub(from)))
	t.show(before, warned)
	empty, err := t.watcher.Wait(ctx, exactly(nil))
	if err != nil {
		return err
	}
	t.printf("   after %s:", short(empty.At.Sub(from)))
	t.show(warned, empty)
	for _, p := range []*lab.Process{lb, frontend} {
		if status, err := p.Wait(ctx); err != nil || status != 0 {
			return errors.Join(fmt.Errorf("%s ended with status %d, expected 0", p.Name, status), err)
		}
	}
	t.printf("   the lb ended after %s, the frontend with its BIRD after %s", short(lb.Ended().Sub(from)),
		short(frontend.Ended().Sub(from)))
	if err := inOrder(t.watcher.Since(from), before.Prefixes(), lb.Ended()); err != nil {
		return err
	}
	// The frontend must have ended its BIRD, too.
	left, err := t.lab.Pod.Processes()
	if err != nil {
		return err
	}
	if len(left) > 0 {
		return fmt.Errorf("processes %v still run in the pod, expected none, not even BIRD", left)
	}
	t.printf("   ok: every VIP had 65535:0 before it was withdrawn, and the lb stayed until all were gone")
	return nil
}

// depreferred is satisfied when the table holds all of these with 65535:0.
func depreferred(want []netip.Prefix) func(lab.Snapshot) error {
	return func(s lab.Snapshot) error {
		for _, p := range want {
			if r, has := s.Routes[p]; !has || !r.GracefulShutdown() {
				return fmt.Errorf("the gateway holds %s, not %s with 65535:0, expected it for every VIP",
					list(s.Prefixes()), p)
			}
		}
		return nil
	}
}

// inOrder checks the end of a pod: each VIP is de-preferred, then permanently withdrawn, and
// then the lb ends.
func inOrder(history []lab.Snapshot, vips []netip.Prefix, lbEnd time.Time) error {
	for _, p := range vips {
		var warned, gone time.Time
		for _, s := range history[1:] {
			r, has := s.Routes[p]
			switch {
			case !has && gone.IsZero():
				gone = s.At
			case has && !gone.IsZero():
				return fmt.Errorf("%s came back after the withdrawal", p)
			case has && r.GracefulShutdown() && warned.IsZero():
				warned = s.At
			case has && !r.GracefulShutdown() && !warned.IsZero():
				return fmt.Errorf("%s lost its 65535:0 again", p)
			}
		}
		switch {
		case warned.IsZero():
			return fmt.Errorf("the gateway never held %s with 65535:0", p)
		case gone.IsZero():
			return fmt.Errorf("%s was not withdrawn", p)
		case lbEnd.Before(gone):
			return fmt.Errorf(
				"the lb ended %s before %s was withdrawn, expected to forward until then", short(gone.Sub(lbEnd)), p,
			)
		}
	}
	return nil
}
