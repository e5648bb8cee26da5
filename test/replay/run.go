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
	Late  time.Duration      `json:"late"` // the largest lateness of a timer
	Err   string             `json:"error,omitempty"`
}

// within reports whether both numbers of each VIP are within a budget.
func (r *result) within(b budget) bool {
	return r.Err == "" && r.Worst.BlackHole <= b.Limit && r.Worst.Dark <= b.Limit
}

// replay runs an incident, again if it misses its budget on a busy machine.
func replay(ctx context.Context, o options, s *scenario, reference bool) result {
	var r result
	for range attempts {
		var err error
		if r, err = attempt(ctx, o, s, reference); err != nil {
			r.Err = err.Error()
		}
		if reference || r.within(s.budget) || r.Late < excuse || ctx.Err() != nil {
			break
		}
	}
	return r
}

// attempt runs an incident once.
func attempt(ctx context.Context, o options, s *scenario, reference bool) (r result, err error) {
	evidence := ""
	fx, err := open(ctx, s, o.binaries, reference)
	if fx == nil {
		return r, err
	}
	defer func() {
		if err != nil || o.keep != "" {
			err = errors.Join(err, o.keepLogs(s, evidence+fx.logs()))
		}
		err = errors.Join(err, fx.close())
	}()
	if err != nil {
		return r, err
	}
	sampling, err := fx.startSampler(ctx, o.interval)
	if err != nil {
		return r, err
	}
	defer sampling.end()
	bound, cancel := context.WithTimeout(ctx, waitTimeout)
	defer cancel()
	if err := sampling.waitCalm(bound); err != nil {
		return r, fmt.Errorf("before the incident: %w", err)
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
		return r, err
	}
	evidence = record.evidence()
	r = result{ByVIP: map[string]numbers{}, Late: sampling.late}
	for _, vip := range vips {
		n := record.measure(vip, gateways)
		r.ByVIP[vip.String()] = n
		r.Worst.BlackHole, r.Worst.Dark = max(r.Worst.BlackHole, n.BlackHole), max(r.Worst.Dark, n.Dark)
	}
	return r, nil
}

// keepLogs writes the updates, the failed requests and the ends of all logs to a file.
func (o options) keepLogs(s *scenario, text string) error {
	dir := o.keep
	if dir == "" {
		dir = os.TempDir()
	}
	return os.WriteFile(filepath.Join(dir, "replay-"+s.id+".log"), []byte(text), 0o600)
}
