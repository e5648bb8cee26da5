package feedback

import (
	"context"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"

	probev1 "github.com/vipgate/vipgate/pkg/api/probe/v1"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/logs"
	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	// Lease is how long the verdicts of a probe stay valid without another report.
	Lease = 3 * time.Second
	// round is the time between two evaluations while a probe is live.
	round = 250 * time.Millisecond
	// minWindow and maxWindow bound how long a path leads to this pod after its last packet.
	minWindow = time.Second
	maxWindow = time.Minute
	// maxShown bounds the VIPs in a Status.
	maxShown = 20
)

// Options configure a Feedback. Every field is required.
type Options struct {
	Probes []spiffeid.ID // may report
	Quorum int           // how many of them must agree
	// Changed is called with each probe whose lease begins or ends. It must not block.
	Changed func(probe spiffeid.ID, live bool)
	Log     *slog.Logger
}

// Feedback holds the verdicts of probes. It is a task and a ProbeService, safe for concurrent use.
type Feedback struct {
	probev1.UnimplementedProbeServiceServer
	Options
	suspects *latest.Value[map[vip.VIP]string]
	wake     chan struct{} // of size 1: a probe reported
	throttle logs.Throttle

	mu      sync.Mutex
	probes  map[spiffeid.ID]*probe
	states  map[vip.VIP]*suspicion
	refused uint64
	problem string // why packets are not seen
}

type probe struct {
	instance string
	reported time.Time
	live     bool
	window   time.Duration
	paths    map[vip.VIP]paths
	sources  []netip.Addr
	// seen holds the time of the last packet of each path; zero: none. Packets of other flows do not
	// extend it, since their addresses may be forged.
	seen map[flow]time.Time
}

// paths lists the paths toward one VIP that have a verdict.
type paths struct{ reachable, dead []netip.AddrPort }

// New returns a Feedback without verdicts.
func New(options Options) *Feedback {
	return &Feedback{
		Options: options, suspects: latest.New(map[vip.VIP]string(nil)), wake: make(chan struct{}, 1),
		probes: map[spiffeid.ID]*probe{}, states: map[vip.VIP]*suspicion{},
	}
}

// String implements task.Task.
func (feedback *Feedback) String() string { return "feedback of probes" }

// Suspects holds the VIPs that probes find dead through this pod, with reasons, in read-only maps.
func (feedback *Feedback) Suspects() *latest.Value[map[vip.VIP]string] { return feedback.suspects }

// Run evaluates verdicts until ctx ends.
func (feedback *Feedback) Run(ctx context.Context) error {
	watch := watcher{seen: feedback.sees}
	defer watch.follow(nil)
	timer := time.NewTimer(round)
	defer timer.Stop()
	for {
		sources := feedback.evaluate(time.Now())
		// Without a live probe no packet is read.
		problem := logs.Text(watch.follow(sources))
		feedback.mu.Lock()
		feedback.problem = problem
		feedback.mu.Unlock()
		wait := round
		if len(sources) == 0 {
			wait = time.Minute
		}
		timer.Reset(wait)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-feedback.wake:
		case <-timer.C:
		}
	}
}

// watcher owns the socket for packets of probes.
type watcher struct {
	seen    func(flow)
	sources []netip.Addr // of the socket
	socket  *packets     // nil without one
	reading sync.WaitGroup
}

// follow opens a socket for sorted sources unless it is open already, and closes any other one.
func (watch *watcher) follow(sources []netip.Addr) (err error) {
	if watch.socket != nil && slices.Equal(sources, watch.sources) {
		return nil
	}
	if watch.socket != nil {
		watch.socket.close()
		watch.reading.Wait()
		watch.socket = nil
	}
	if len(sources) == 0 {
		return nil
	}
	socket, err := open(sources)
	if err != nil {
		return err
	}
	watch.socket, watch.sources = socket, sources
	watch.reading.Go(func() { socket.read(watch.seen) })
	return nil
}

func (feedback *Feedback) sees(f flow) {
	feedback.mu.Lock()
	defer feedback.mu.Unlock()
	for _, probe := range feedback.probes {
		if _, known := probe.seen[f]; known {
			probe.seen[f] = time.Now()
		}
	}
}

// evaluate ends leases, updates the suspects, and returns the sources of the live probes, sorted.
func (feedback *Feedback) evaluate(now time.Time) (sources []netip.Addr) {
	feedback.mu.Lock()
	defer feedback.mu.Unlock()
	live, dead := 0, map[vip.VIP][]string{}
	for id, probe := range feedback.probes {
		if is := now.Sub(probe.reported) < Lease; is != probe.live {
			probe.live = is
			feedback.Changed(id, is)
		}
		if !probe.live {
			probe.paths, probe.sources, probe.seen = nil, nil, nil
			continue
		}
		live++
		sources = append(sources, probe.sources...)
		for v := range probe.paths {
			if probe.through(v, now).isDead() {
				dead[v] = append(dead[v], id.String())
			}
		}
	}
	for v := range dead {
		slices.Sort(dead[v])
		if feedback.states[v] == nil {
			feedback.states[v] = &suspicion{}
		}
	}
	suspects := map[vip.VIP]string{}
	for v, state := range feedback.states {
		state.update(now, feedback.Quorum, live, dead[v])
		switch {
		case state.detail != "":
			suspects[v] = state.detail
		case now.Sub(state.ended) > maxWait && dead[v] == nil:
			delete(feedback.states, v)
		}
	}
	if !maps.Equal(suspects, feedback.suspects.Load()) {
		feedback.suspects.Set(suspects)
	}
	slices.SortFunc(sources, netip.Addr.Compare)
	return slices.Compact(sources)
}

// through counts the paths to a VIP that lead to this pod; Feedback.mu is held.
func (probe *probe) through(v vip.VIP, now time.Time) verdict {
	here := func(list []netip.AddrPort) (n int) {
		for _, source := range list {
			if now.Sub(probe.seen[flow{source, v.Prefix().Addr()}]) <= probe.window {
				n++
			}
		}
		return n
	}
	return verdict{here(probe.paths[v].reachable), here(probe.paths[v].dead)}
}

// Status is the state of a probe.
type Status struct {
	ID       spiffeid.ID
	Live     bool
	Reported time.Time // zero: never
	// Paths, Here and Dead count paths with a verdict, through this pod, and dead through this pod.
	Paths, Here, Dead int
	DeadVIPs          []vip.VIP // through this pod, at most 20
}

// Status returns the state of each probe, sorted by ID.
func (feedback *Feedback) Status() []Status {
	now := time.Now()
	feedback.mu.Lock()
	defer feedback.mu.Unlock()
	all := make([]Status, 0, len(feedback.Probes))
	for _, id := range feedback.Probes {
		status := Status{ID: id}
		if probe := feedback.probes[id]; probe != nil {
			status.Live, status.Reported = probe.live, probe.reported
			for v, paths := range probe.paths {
				through := probe.through(v, now)
				status.Paths += len(paths.reachable) + len(paths.dead)
				status.Here += through.reachable + through.dead
				status.Dead += through.dead
				if through.isDead() {
					status.DeadVIPs = append(status.DeadVIPs, v)
				}
			}
		}
		slices.SortFunc(status.DeadVIPs, vip.Compare)
		status.DeadVIPs = status.DeadVIPs[:min(len(status.DeadVIPs), maxShown)]
		all = append(all, status)
	}
	slices.SortFunc(all, func(a, b Status) int { return strings.Compare(a.ID.String(), b.ID.String()) })
	return all
}

// Problem returns why a verdict cannot count, or "".
func (feedback *Feedback) Problem() string {
	feedback.mu.Lock()
	defer feedback.mu.Unlock()
	return feedback.problem
}

// Refused returns the number of refused reports since the start.
func (feedback *Feedback) Refused() uint64 {
	feedback.mu.Lock()
	defer feedback.mu.Unlock()
	return feedback.refused
}
