package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"
)

const (
	// excuse is the lateness of timers from which a missed budget is measured again.
	excuse   = 100 * time.Millisecond
	attempts = 3
)

// result is the outcome of an incident, in vipgate or in the reference.
type result struct {
	ByVIP map[string]numbers `json:"byVIP"`
	Worst numbers            `json:"worst"`
	Pods  int                `json:"pods"` // pods that withdrew a VIP
	Late  time.Duration      `json:"late"` // the largest lateness of a timer
	Err   string             `json:"error,omitempty"`
}

// within reports whether a result is within a budget.
func (r *result) within(b budget) bool {
	return r.Err == "" && r.Pods <= b.Pods && r.Worst.BlackHole <= b.Limit && r.Worst.Dark <= b.Limit
}

// replay runs an incident, again if it misses its budget on a busy machine.
func (o options) replay(ctx context.Context, s *scenario, reference bool) (r result) {
	for range attempts {
		if err := o.attempt(ctx, s, reference, &r); err != nil {
			r.Err = err.Error()
		}
		if reference || r.within(s.Budget) || r.Late < excuse || ctx.Err() != nil {
			break
		}
	}
	return r
}

// attempt runs an incident once.
func (o options) attempt(ctx context.Context, s *scenario, reference bool, r *result) (err error) {
	*r = result{ByVIP: map[string]numbers{}}
	fx, err := open(ctx, s, o.binaries, reference)
	if fx == nil {
		return err
	}
	evidence := ""
	defer func() {
		if err != nil || o.keep != "" {
			path := filepath.Join(o.keep, fmt.Sprintf("replay-%s-reference=%t.log", s.ID, reference))
			err = errors.Join(err, os.WriteFile(path, []byte(evidence+fx.logs()), 0o600))
		}
		err = errors.Join(err, fx.close())
	}()
	if err != nil {
		return err
	}
	sampling, err := fx.startSampler(ctx, o.interval)
	defer sampling.end()
	if err != nil {
		return fmt.Errorf("before the incident: %w", err)
	}
	begin := time.Now()
	inject := s.inject
	if reference {
		inject = s.reference
	}
	errInject := inject(ctx, fx)
	if errInject == nil {
		sleep(ctx, o.observed)
	}
	record, err := sampling.stop(begin)
	if err := errors.Join(errInject, err, context.Cause(ctx)); err != nil {
		return err
	}
	evidence, r.Late, r.Pods = record.evidence(), sampling.late, record.withdrawers()
	for _, vip := range vips {
		n := record.measure(vip, !s.unserved[vip])
		r.ByVIP[vip.String()] = n
		r.Worst.BlackHole, r.Worst.Dark = max(r.Worst.BlackHole, n.BlackHole), max(r.Worst.Dark, n.Dark)
	}
	return nil
}
