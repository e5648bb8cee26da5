package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/dataplane"
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/lab"
)

const (
	planeChangeGoal = "median ≤ 5"
	planeStartGoal  = "max ≤ 500"

	// tableSize and tableSeed are the defaults of a stream.
	tableSize = 1009
	tableSeed = 1

	// planeTargets4 contains the targets of the data plane, in the backend's namespace. It is part
	// of the pod's connected network, as the data plane requires.
	planeTargets4 = "172.16.16.0/20"
	// stateFolder is on a tmpfs, as the volume of the manifests.
	stateFolder = "/dev/shm"
)

// planeTarget returns the target of the data plane with an index: names sort like the indices.
func planeTarget(i int, families []vip.Family) plan.Target {
	t := plan.Target{Name: fmt.Sprintf("target-%04d", i)}
	for f := range t.Roles {
		t.Roles[f] = plan.Down
	}
	for _, f := range families {
		t.IPs = append(t.IPs, planeAddress(i, f))
		t.Roles[f] = plan.Serving
	}
	return t
}

func planeAddress(i int, f vip.Family) netip.Addr {
	k := i + 1
	if f == vip.IPv4 {
		return netip.AddrFrom4([4]byte{172, 16, 16 + byte(k>>8), byte(k)})
	}
	return netip.AddrFrom16([16]byte{0: 0xfd, 3: 0x16, 13: 2, 14: byte(k >> 8), 15: byte(k)})
}

// planeStreams returns streams with a VIP of each family and a number of targets each. Stream i
// has the targets from i*targets on.
func planeStreams(first, streams, targets int, size uint32, families []vip.Family) map[string]*plan.Stream {
	vips := numberedVIPs((first+streams)*len(families), families)
	made := make(map[string]*plan.Stream, streams)
	for i := first; i < first+streams; i++ {
		s := &plan.Stream{
			Name: streamName(i), VIPs: vips[i*len(families) : (i+1)*len(families)],
			Size: size, Seed: tableSeed, DrainTime: time.Second,
		}
		for j := range targets {
			s.Targets = append(s.Targets, planeTarget(i*targets+j, families))
		}
		made[s.Name] = s
	}
	return made
}

// planeFixture is a lab for a data plane, whose targets only have addresses.
type planeFixture struct {
	*lab.Lab
	state string
	plane *runningPlane
}

// newPlaneFixture creates a lab with this number of reachable targets.
func newPlaneFixture(ctx context.Context, targets int, families []vip.Family) (_ *planeFixture, err error) {
	g := &planeFixture{}
	defer func() {
		if err != nil {
			err = errors.Join(err, g.close())
		}
	}()
	if g.Lab, err = lab.New(); err != nil {
		return nil, err
	}
	if g.state, err = os.MkdirTemp(stateFolder, "vg-"); err != nil {
		return nil, fmt.Errorf("state directory: %w", err)
	}
	var batch strings.Builder
	fmt.Fprintf(&batch, "route add local %s dev lo\n", planeTargets4)
	if slices.Contains(families, vip.IPv6) {
		// Each target has a separate address: the kernel solicits neighbors by address only.
		for i := range targets {
			fmt.Fprintf(&batch, "addr add %s/64 dev pod0 nodad\n", planeAddress(i, vip.IPv6))
		}
	}
	path := filepath.Join(g.Dir, "targets")
	if err := os.WriteFile(path, []byte(batch.String()), 0o600); err != nil {
		return nil, fmt.Errorf("targets: %w", err)
	}
	_, err = g.Backend.Run(ctx, "ip", "-batch", path)
	return g, err
}

func (g *planeFixture) close() error {
	var errs []error
	if g.plane != nil {
		errs = append(errs, g.plane.stop())
		g.plane = nil
	}
	if g.Lab != nil {
		errs = append(errs, g.Lab.Close())
	}
	if g.state != "" {
		errs = append(errs, os.RemoveAll(g.state))
	}
	return errors.Join(errs...)
}

// runningPlane is a data plane at work in a namespace.
type runningPlane struct {
	*dataplane.Plane
	revision uint64
	cancel   context.CancelFunc
	ended    chan error
}

// start starts the data plane in the pod. Existing kernel state is kept.
func (g *planeFixture) start(ctx context.Context, conntrack dataplane.Conntrack, fast dataplane.FastPath) error {
	p := &runningPlane{ended: make(chan error, 1)}
	ctx, p.cancel = context.WithCancel(ctx)
	var err error
	p.Plane, err = dataplane.New(
		dataplane.Options{
			Config: dataplane.Config{Conntrack: conntrack}, FastPath: fast, StateDir: g.state,
			Log: slog.New(slog.DiscardHandler),
		},
	)
	if err != nil {
		p.cancel()
		return fmt.Errorf("data plane: %w", err)
	}
	go func() { p.ended <- g.Pod.Do(func() error { return p.Run(ctx) }) }()
	g.plane = p
	return p.waitReady()
}

// stop ends the data plane; the kernel state stays.
func (p *runningPlane) stop() error {
	p.cancel()
	if err := <-p.ended; err != nil && !errors.Is(err, context.Canceled) {
		return fmt.Errorf("data plane: %w", err)
	}
	return nil
}

// waitFastPath waits until the fast path is attached, which follows a confirmed configuration.
func (p *runningPlane) waitFastPath(ctx context.Context, fast dataplane.FastPath) error {
	if fast == dataplane.FastPathOff {
		return nil
	}
	return lab.Eventually(ctx, 10*time.Millisecond, func() error {
		if state := p.FastPath(); state.Reason != "" || len(state.Interfaces) == 0 {
			return fmt.Errorf("the fast path is not attached: %s", state.Reason)
		}
		return nil
	})
}

func (p *runningPlane) waitReady() error {
	timer := time.NewTimer(waitTimeout)
	defer timer.Stop()
	select {
	case <-p.Ready():
		return nil
	case err := <-p.ended:
		p.ended <- err
		return fmt.Errorf("data plane ended by itself: %w", err)
	case <-timer.C:
		return fmt.Errorf("data plane is not ready after %v", waitTimeout)
	}
}

// configure passes streams to the data plane, waits until they are applied, and returns how long
// that took. The time includes the confirmation that all VIPs and serving targets are in the
// kernel.
func (p *runningPlane) configure(streams map[string]*plan.Stream) (time.Duration, error) {
	p.revision++
	w := &plan.Desired{Revision: p.revision, Streams: streams}
	timer := time.NewTimer(waitTimeout)
	defer timer.Stop()
	began := time.Now()
	p.Configure(w)
	for {
		state, changed := p.State().Get()
		if state.Revision == w.Revision {
			took := time.Since(began)
			return took, differs(w, state)
		}
		select {
		case <-changed:
		case err := <-p.ended:
			p.ended <- err
			return 0, fmt.Errorf("data plane ended by itself: %w", err)
		case <-timer.C:
			return 0, fmt.Errorf("data plane is at revision %d, not %d, after %v; problems %v, error %v",
				state.Revision, w.Revision, waitTimeout, state.Problems, state.Err)
		}
	}
}

// differs returns an error that names the first difference between the desired state and the
// applied state.
func differs(w *plan.Desired, state plan.State) error {
	for _, s := range w.Streams {
		got := state.Streams[s.Name]
		if got == nil {
			return fmt.Errorf("data plane knows no %s; problems %v, error %v", s.Name, state.Problems, state.Err)
		}
		for _, v := range s.VIPs {
			if state.VIPs[v] != s.Name {
				return fmt.Errorf("packets to %s do not go to %s; problems %v, error %v", v, s.Name, state.Problems,
					state.Err)
			}
		}
		for _, f := range vip.Families {
			serving := map[string]struct{}{}
			for _, t := range s.Targets {
				if t.Roles[f] == plan.Serving {
					serving[t.Name] = struct{}{}
				}
			}
			if !maps.Equal(serving, got.Serving[f]) {
				return fmt.Errorf("%s: targets that serve %s are %v, want %v; problems %v, error %v", s.Name, f,
					got.Serving[f], serving, state.Problems, state.Err)
			}
		}
	}
	return nil
}

// with returns a copy of streams with one of them replaced. All other streams are the same
// pointers, as after a change of one stream by the lb.
func with(streams map[string]*plan.Stream, s *plan.Stream) map[string]*plan.Stream {
	changed := maps.Clone(streams)
	changed[s.Name] = s
	return changed
}

// withRole returns a copy of a stream in which one target has another role.
func withRole(s *plan.Stream, i int, r plan.Role) *plan.Stream {
	changed := *s
	changed.Targets = slices.Clone(s.Targets)
	for f, role := range changed.Targets[i].Roles {
		if role != plan.Down {
			changed.Targets[i].Roles[f] = r
		}
	}
	return &changed
}

// withTarget returns a copy of a stream with an additional target.
func withTarget(s *plan.Stream, t plan.Target) *plan.Stream {
	changed := *s
	changed.Targets = append(slices.Clone(s.Targets), t)
	return &changed
}

// measurePlane is row 17: changes, then starts, of a data plane with 1 000 targets
// of both families in 100 streams.
func measurePlane(ctx context.Context, s *session) (err error) {
	const perStream = 10
	n := s.sizes([]int{100}, []int{10})[0]
	g, err := newPlaneFixture(ctx, n*perStream+1, bothFamilies)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, g.close()) }()
	if err := g.start(ctx, dataplane.ConntrackOn, dataplane.FastPathOff); err != nil {
		return err
	}
	streams := planeStreams(0, n, perStream, tableSize, bothFamilies)
	took, err := g.plane.configure(streams)
	if err != nil {
		return err
	}
	s.record(Measurement{
		Row: 17, What: "everything at once, into an empty kernel → confirmed", Method: vipgate,
		N: n * perStream, Unit: "ms", Samples: []float64{milliseconds(took)},
	})
	if err := measurePlaneChanges(ctx, s, g, streams, perStream); err != nil {
		return err
	}
	return measurePlaneStarts(ctx, s, g, streams, n*perStream)
}

// measurePlaneChanges changes one thing after another, each in the next stream.
func measurePlaneChanges(ctx context.Context, s *session, g *planeFixture, streams map[string]*plan.Stream,
	perStream int,
) error {
	n := len(streams)
	what := func(what string) *Measurement {
		return &Measurement{
			Row: 17, What: what + " → confirmed", Method: vipgate, N: n * perStream, Unit: "ms", Goal: planeChangeGoal,
		}
	}
	drains, serves := what("one target drains"), what("one target serves again")
	comes, falls, goes := what("one target comes"), what("one target falls"), what("one target that fell goes")
	passes := what("one routed target passes its first check")
	for i := range s.repeats(200, 4) {
		stream := streams[streamName(i%n)]
		fresh := withTarget(stream, planeTarget(n*perStream, bothFamilies))
		// With checks through the VIP, the default, a target has its rules and routes before its first
		// check passes.
		passed := *fresh
		passed.RouteAll = true
		for _, step := range []struct {
			m    *Measurement
			next *plan.Stream
		}{
			{drains, withRole(stream, i%perStream, plan.Draining)},
			{serves, stream},
			{comes, fresh},
			{falls, withRole(fresh, perStream, plan.Down)},
			{goes, stream},
			{nil, withRole(&passed, perStream, plan.Down)},
			{passes, &passed},
			{nil, withRole(&passed, perStream, plan.Down)},
			{nil, stream},
		} {
			if step.m != nil {
				if err := backoff.Sleep(ctx, between()); err != nil {
					return err
				}
			}
			took, err := g.plane.configure(with(streams, step.next))
			switch {
			case err != nil && step.m == nil:
				return fmt.Errorf("between two measurements: %w", err)
			case err != nil:
				return fmt.Errorf("%s: %w", step.m.What, err)
			case step.m != nil:
				step.m.Samples = append(step.m.Samples, milliseconds(took))
			}
		}
	}
	for _, m := range []*Measurement{drains, serves, comes, falls, goes, passes} {
		s.record(*m)
	}
	return nil
}

// measurePlaneStarts repeatedly ends the data plane and starts another one over the same kernel
// state.
func measurePlaneStarts(ctx context.Context, s *session, g *planeFixture, streams map[string]*plan.Stream,
	n int,
) error {
	ready := Measurement{Row: 17, What: "start → kernel read", Method: vipgate, N: n, Unit: "ms", Goal: planeStartGoal}
	first := Measurement{
		Row: 17, What: "after a start, what was wanted before → confirmed", Method: vipgate, N: n, Unit: "ms",
	}
	for range s.repeats(20, 2) {
		if err := g.plane.stop(); err != nil {
			return err
		}
		g.plane = nil
		if err := backoff.Sleep(ctx, between()); err != nil {
			return err
		}
		began := time.Now()
		if err := g.start(ctx, dataplane.ConntrackOn, dataplane.FastPathOff); err != nil {
			return err
		}
		ready.Samples = append(ready.Samples, milliseconds(time.Since(began)))
		took, err := g.plane.configure(streams)
		if err != nil {
			return err
		}
		first.Samples = append(first.Samples, milliseconds(took))
	}
	s.record(ready)
	s.record(first)
	return nil
}
