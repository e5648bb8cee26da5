package availability_test

import (
	"fmt"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/emptypb"

	loadbalancerv1 "github.com/vipgate/vipgate/pkg/api/loadbalancer/v1"
	"github.com/vipgate/vipgate/pkg/meridio/availability"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/identitytest"
	"github.com/vipgate/vipgate/test/meridiotest"
)

type states = map[vip.VIP]vip.State

// Probes of a test: short, but long enough for a loaded machine.
const interval, within = 100 * time.Millisecond, 4 * time.Second

func TestAvailableIsReadyForEveryVIP(t *testing.T) {
	f := newFixture(t)
	lb, w := f.meridio(), f.watch(interval, within)
	var since time.Time // of the state of VIP B
	look := func(u readiness.Update) {
		for _, r := range u.Changed {
			if r.VIP == vipB {
				since = r.Since
			}
		}
	}
	live := func(u readiness.Update) { w.live(u); look(u) }
	w.until("unavailable", w.is(states{vipA: vip.NotReady, vipB: vip.NotReady}), look)
	if w.at.Service != availability.Service {
		t.Errorf("service %q", w.at.Service)
	}
	began := since
	lb.SetAvailable(true)
	w.until("available", w.is(states{vipA: vip.Ready, vipB: vip.Ready}), live)
	available := since
	added := vip.Require("20.0.0.9/32")
	w.vips.Set([]vip.VIP{vipB, added})
	w.until("other VIPs", w.is(states{vipB: vip.Ready, added: vip.Ready}), live)
	if !available.After(began) || !since.Equal(available) {
		t.Errorf("unavailable since %v, available since %v and, with other VIPs, %v", began, available, since)
	}
	lb.SetAvailable(false)
	w.until("unavailable again", w.is(states{vipB: vip.NotReady, added: vip.NotReady}), live)
	if !since.After(available) {
		t.Errorf("available since %v, unavailable since %v", available, since)
	}
}

func TestOtherIdentifierIsUnavailable(t *testing.T) {
	f := newFixture(t)
	lb := meridiotest.New(meridiotest.Options{Socket: f.socket, Credentials: f.creds(f.lb), Host: "another-pod"})
	lb.SetAvailable(true)
	harness.Must(t, lb.Start())
	defer func() {
		harness.Check(t, lb.Kill())
	}()
	w := f.watch(interval, within)
	var detail string
	w.until("unavailable", w.is(states{vipA: vip.NotReady, vipB: vip.NotReady}), func(u readiness.Update) {
		for _, r := range u.Changed {
			if r.VIP == vipA {
				detail = r.Detail
			}
		}
	})
	harness.WantText(t, detail, `"another-pod"`, `"`+host+`"`)
}

// The end of the stream ends the readiness immediately, not only when the lease expires.
func TestKilledEndsAtOnce(t *testing.T) {
	f := newFixture(t)
	lb, w := f.meridio(), f.watch(interval, time.Minute)
	lb.SetAvailable(true)
	w.until("available", w.is(states{vipA: vip.Ready, vipB: vip.Ready}), nil)
	instance, killed := w.at.Position.InstanceID, time.Now()
	harness.Must(t, lb.Kill())
	w.until("lost", func() bool { return !w.at.Synced }, nil)
	if w.at.EndedAt.Before(killed) || !w.at.EndedAt.Before(w.at.LeaseEnd) {
		t.Errorf("killed at %v, ended at %v, lease until %v", killed, w.at.EndedAt, w.at.LeaseEnd)
	}
	harness.Must(t, lb.Start())
	w.until("restarted", w.is(states{vipA: vip.NotReady, vipB: vip.NotReady}), nil)
	if w.at.Position.InstanceID == instance {
		t.Errorf("the restarted load balancer is the instance %s, too", instance)
	}
	lb.SetAvailable(true)
	w.until("available again", w.is(states{vipA: vip.Ready, vipB: vip.Ready}), w.live)
}

// A load balancer that hangs loses the lease, although its stream is silent anyway. Its next
// response restores the lease on the same stream.
func TestHungLosesLease(t *testing.T) {
	const within = 300 * time.Millisecond
	f := newFixture(t)
	lb, w := f.meridio(), f.watch(interval, within)
	lb.SetAvailable(true)
	w.until("available", w.is(states{vipA: vip.Ready, vipB: vip.Ready}), nil)
	for range 2 {
		lb.Freeze(true)
		w.until("lease expired", func() bool { return w.at.LeaseEnd.Before(time.Now()) }, nil)
		if held := w.at.LeaseEnd.Sub(w.at.LastMessage); held != interval+within {
			t.Errorf("the lease was valid for %v after the last answer", held)
		}
		failures := w.client.Stats().Failures
		await.True(t, "another late probe", func() bool { return w.client.Stats().Failures > failures })
		if w.take(); !w.at.Synced || w.at.LeaseEnd.After(time.Now()) {
			t.Errorf("while it hangs: %+v", w.at)
		}
		lb.Freeze(false)
		w.until("lease renewed", func() bool { return w.at.LeaseEnd.After(time.Now()) }, nil)
		w.until("still available", w.is(states{vipA: vip.Ready, vipB: vip.Ready}), nil)
	}
	if s := w.Stats(); s.Streams != 1 || s.Failures != 0 {
		t.Errorf("streams were opened again: %+v", s)
	}
	for _, want := range []string{"load balancer probe failed", "load balancer answers probes again"} {
		if n := strings.Count(w.log.String(), want); n != 2 {
			t.Errorf("logged %q %d times for 2 freezes:\n%s", want, n, w.log)
		}
	}
}

// scripted is a load balancer whose streams a test writes.
type scripted struct {
	loadbalancerv1.UnimplementedStreamAvailabilityServiceServer
	watch func(n int64, send func(available bool) error, end <-chan struct{}) error
	calls atomic.Int64
}

func (s *scripted) Watch(_ *emptypb.Empty, stream grpc.ServerStreamingServer[loadbalancerv1.Response]) error {
	return s.watch(s.calls.Add(1), func(available bool) error {
		target := &loadbalancerv1.Target{}
		if available {
			target.Context = map[string]string{"identifier": host}
		}
		return stream.Send(&loadbalancerv1.Response{Targets: []*loadbalancerv1.Target{target}})
	}, stream.Context().Done())
}

// A load balancer that accepts and never answers another Watch hangs.
func TestSilentProbeLosesLease(t *testing.T) {
	f := newFixture(t)
	s := &scripted{watch: func(n int64, send func(bool) error, end <-chan struct{}) error {
		if n == 1 {
			if err := send(true); err != nil {
				return err
			}
		}
		<-end
		return nil
	}}
	f.serve(f.socket, func(r grpc.ServiceRegistrar) { loadbalancerv1.RegisterStreamAvailabilityServiceServer(r, s) })
	w := f.watch(interval, 300*time.Millisecond)
	w.until("available", w.is(states{vipA: vip.Ready, vipB: vip.Ready}), nil)
	first := w.at.LeaseEnd
	w.until("lease expired", func() bool { return w.at.LeaseEnd.Before(time.Now()) }, nil)
	if w.at.LeaseEnd != first {
		t.Errorf("the lease was renewed from %v to %v without an answer", first, w.at.LeaseEnd)
	}
}

// A stream that is not updated is found by probes that report another state.
func TestContradictionEndsStream(t *testing.T) {
	f := newFixture(t)
	s := &scripted{watch: func(n int64, send func(bool) error, end <-chan struct{}) error {
		if err := send(n == 1); err != nil {
			return err
		}
		<-end
		return nil
	}}
	f.serve(f.socket, func(r grpc.ServiceRegistrar) { loadbalancerv1.RegisterStreamAvailabilityServiceServer(r, s) })
	w := f.watch(interval, within)
	w.until("available", w.is(states{vipA: vip.Ready, vipB: vip.Ready}), nil)
	w.until("unavailable", w.is(states{vipA: vip.NotReady, vipB: vip.NotReady}), nil)
	if !strings.Contains(w.log.String(), "does not update its streams") {
		t.Errorf("log:\n%s", w.log)
	}
}

// Many probes in a short time use the same two connections, and leave no stream open.
func TestProbesKeepConnections(t *testing.T) {
	f := newFixture(t)
	lb, w := f.meridio(), f.watchState(time.Millisecond, within, time.Millisecond)
	lb.SetAvailable(true)
	w.until("available", w.is(states{vipA: vip.Ready, vipB: vip.Ready}), nil)
	w.until("many probes", func() bool { return w.client.Stats().Probes > 500 }, w.live)
	if s, probes := w.Stats(), w.client.Stats(); s.Streams != 1 || s.Failures != 0 || probes.Failures != 0 {
		t.Errorf("%+v, %+v", s, probes)
	}
	await.True(t, "probes have ended", func() bool { return lb.Watchers() <= 2 })
}

// A load balancer of Meridio logs each Watch, so probes call Watch only once after the stream opens
// and after a hang.
func TestProbesOpenFewStreams(t *testing.T) {
	f := newFixture(t)
	lb, w := f.meridio(), f.watch(10*time.Millisecond, within)
	lb.SetAvailable(true)
	w.until("available", w.is(states{vipA: vip.Ready, vipB: vip.Ready}), nil)
	w.until("a second probe", func() bool { return w.client.Stats().Probes > 1 }, w.live)
	if n := lb.Opened(); n != 2 {
		t.Errorf("%d streams were opened, want 2", n)
	}
	for range 2 {
		end, probes, opened := w.at.LeaseEnd, w.client.Stats().Probes, lb.Opened()
		w.until("many probes", func() bool { return w.client.Stats().Probes > probes+50 }, w.live)
		if !w.at.LeaseEnd.After(end) {
			t.Error("the probes do not renew the lease")
		}
		if n := lb.Opened() - opened; n > 0 {
			t.Errorf("50 probes opened %d streams", n)
		}
		failures := w.client.Stats().Failures
		lb.Freeze(true)
		w.until("a late probe", func() bool { return w.client.Stats().Failures > failures }, nil)
		lb.Freeze(false)
		w.until("live again", func() bool { return w.at.LeaseEnd.After(time.Now()) }, nil)
		if lb.Opened() == opened {
			t.Error("after a hang the state was not asked for")
		}
	}
}

// A state probe detects a load balancer whose process responds but whose Watch hangs.
func TestHungWatchLosesLease(t *testing.T) {
	f := newFixture(t)
	f.serveScripted(answering(func(n int64, answer func() error, end <-chan struct{}) error {
		if n == 1 {
			return answer()
		}
		<-end
		return nil
	}))
	w := f.watchState(50*time.Millisecond, 300*time.Millisecond, time.Second)
	w.until("available", w.is(states{vipA: vip.Ready, vipB: vip.Ready}), nil)
	end := w.at.LeaseEnd
	w.until("lease expired", func() bool { return w.at.LeaseEnd.Before(time.Now()) }, nil)
	if !w.at.LeaseEnd.After(end) {
		t.Error("signs of life did not renew the lease")
	}
	failures := w.client.Stats().Failures
	w.until("another late probe", func() bool { return w.client.Stats().Failures > failures }, func(u readiness.Update) {
		if u.LeaseEnd.After(time.Now()) {
			t.Errorf("a sign of life renewed the lease: %+v", u)
		}
	})
}

func TestGracefulStopIsUnavailable(t *testing.T) {
	f := newFixture(t)
	lb, w := f.meridio(), f.watch(interval, within)
	lb.SetAvailable(true)
	w.until("available", w.is(states{vipA: vip.Ready, vipB: vip.Ready}), nil)
	stopped := make(chan error, 1)
	go func() { stopped <- lb.Stop() }()
	w.until("unavailable", w.is(states{vipA: vip.NotReady, vipB: vip.NotReady}), nil)
	w.until("ended", func() bool { return !w.at.Synced }, nil)
	harness.Check(t, <-stopped)
}

// A rotation of the SVID moves both connections without a gap and keeps the instance.
func TestRotationMovesWithoutGap(t *testing.T) {
	f := newFixture(t)
	lb, w := f.meridio(), f.watch(interval, within)
	lb.SetAvailable(true)
	w.until("available", w.is(states{vipA: vip.Ready, vipB: vip.Ready}), nil)
	instance := w.at.Position.InstanceID
	for n := uint64(1); n <= 3; n++ {
		w.svid.Set(n)
		w.until("moved", func() bool {
			return w.Stats().Moves == n && w.is(states{vipA: vip.Ready, vipB: vip.Ready})()
		}, w.live)
		w.until("first connections closed", func() bool { return lb.Watchers() <= 2 }, w.live)
	}
	if w.at.Position.InstanceID != instance {
		t.Errorf("instance %s became %s", instance, w.at.Position.InstanceID)
	}
	w.Report(readiness.ReportDelta{Applied: w.at.Position})
	if err := w.Reported(t.Context()); err != nil {
		t.Errorf("a report waits for a load balancer that takes none: %v", err)
	}
}

// A load balancer of vipgate that replaces the socket takes over without a gap. Its per-VIP states
// then replace the single state.
func TestUpgradeInPlace(t *testing.T) {
	f := newFixture(t)
	old, w := f.meridio(), f.watch(interval, within)
	old.SetAvailable(true)
	w.until("probed", func() bool { return w.client.Stats().Probes > 2 }, nil)
	w.until("available", w.is(states{vipA: vip.Ready, vipB: vip.Ready}), nil)
	probed := w.client.Stats().Probes

	path := filepath.Join(identitytest.ShortDir(t), "new.sock")
	b := f.vipgate(path, readiness.TableOptions{Lease: time.Minute})
	b.table.Commit(readiness.Decision{Changed: []readiness.VIPReadiness{{VIP: vipA, State: vip.Ready}, {VIP: vipB}}})
	f.replace(path)
	// Until it is synced, the old one counts.
	await.True(t, "second connection", func() bool { return len(b.readiness.Watchers()) == 1 })
	await.True(t, "probes", func() bool { return w.client.Stats().Probes > probed+3 })
	w.take()
	w.live(w.at)
	if !w.is(states{vipA: vip.Ready, vipB: vip.Ready})() {
		t.Errorf("before the new load balancer is synced: %+v", w.at)
	}
	b.table.Commit(readiness.Decision{Synced: true})
	synced := time.Now()
	w.until("upgraded", func() bool {
		return w.at.Service == readiness.Service && w.is(states{vipA: vip.Ready, vipB: vip.NotReady})()
	}, w.live)
	t.Logf("upgraded %v after the new load balancer was synced", time.Since(synced))
	w.until("old stream closed", func() bool { return old.Watchers() == 0 }, w.live)
	harness.Must(t, old.Kill())
	probes := w.client.Stats().Probes
	if s := w.Stats(); s.Failures != 0 || s.Moves != 1 || b.availability.Watching().Load() != 0 {
		t.Errorf("%+v", s)
	}
	if w.client.Stats().Probes != probes {
		t.Error("the old service is probed after the upgrade")
	}
}

// A load balancer of vipgate that goes away and is replaced by one of Meridio is followed, too.
func TestDowngradeInPlace(t *testing.T) {
	f := newFixture(t)
	b := f.vipgate(f.socket, readiness.TableOptions{Lease: time.Minute})
	b.table.Commit(readiness.Decision{Changed: []readiness.VIPReadiness{{VIP: vipA, State: vip.Ready}}, Synced: true})
	w := f.watch(interval, within)
	w.until("ready", w.is(states{vipA: vip.Ready}), nil)
	if w.at.Service != readiness.Service {
		t.Errorf("service %q", w.at.Service)
	}
	old := f.meridio() // replaces the socket
	old.SetAvailable(true)
	b.table.GoAway(time.Minute)
	w.until("downgraded", func() bool {
		return w.at.Service == availability.Service && w.is(states{vipA: vip.Ready, vipB: vip.Ready})()
	}, func(u readiness.Update) {
		if u.Service == readiness.Service {
			w.live(u)
		}
	})
	b.kill()
	w.until("probed", func() bool { return w.client.Stats().Probes > 3 }, w.live)
	if w.at.GoingAway {
		t.Errorf("the load balancer in use goes away: %+v", w.at)
	}
}

// A server with neither service is not a load balancer. Its error is logged once, not per retry.
func TestOtherServerIsRefused(t *testing.T) {
	f := newFixture(t)
	f.serve(f.socket, func(grpc.ServiceRegistrar) {})
	w := f.watch(interval, within)
	w.until("many attempts", func() bool { return w.Stats().Failures > 5 }, nil)
	if w.at.Synced || w.at.Err == nil || !strings.Contains(w.at.Err.Error(), "no load balancer of vipgate or Meridio") {
		t.Errorf("%+v", w.at)
	}
	if n := strings.Count(w.log.String(), "level=WARN"); n != 1 {
		t.Errorf("%d warnings:\n%s", n, w.log)
	}
}

// answering returns a load balancer that is available. probe answers the n-th probe, from 1.
func answering(probe func(n int64, answer func() error, end <-chan struct{}) error) *scripted {
	return &scripted{watch: func(n int64, send func(bool) error, end <-chan struct{}) error {
		available := func() error { return send(true) }
		if n > 1 {
			return probe(n-1, available, end)
		}
		if err := available(); err != nil {
			return err
		}
		<-end
		return nil
	}}
}

func (f *fixture) serveScripted(s *scripted) {
	f.t.Helper()
	f.serve(f.socket, func(r grpc.ServiceRegistrar) { loadbalancerv1.RegisterStreamAvailabilityServiceServer(r, s) })
}

// The lease counts from the request of a probe: neither a late response nor a client that reads
// late extends the lease.
func TestLeaseBeginsWithTheProbe(t *testing.T) {
	const delay = 300 * time.Millisecond
	f := newFixture(t)
	asked := make(chan time.Time, 1)
	f.serveScripted(answering(func(n int64, answer func() error, end <-chan struct{}) error {
		if n == 1 {
			asked <- time.Now()
			select {
			case <-time.After(delay):
				return answer()
			case <-end:
				return nil
			}
		}
		<-end // no other answer renews the lease
		return nil
	}))
	w := f.watchState(interval, within, interval)
	w.until("available", w.is(states{vipA: vip.Ready, vipB: vip.Ready}), nil)
	first := w.at.LeaseEnd
	w.until("lease renewed by the probe", func() bool { return w.at.LeaseEnd.After(first) }, nil)
	if latest := (<-asked).Add(interval + within); w.at.LeaseEnd.After(latest) {
		t.Errorf("the lease ends %v later than %v after the question", w.at.LeaseEnd.Sub(latest), interval+within)
	}
}

// Neither a failed probe nor a change of the VIPs renews the lease.
func TestFailedProbeKeepsLeaseEnd(t *testing.T) {
	f := newFixture(t)
	f.serveScripted(answering(func(_ int64, _ func() error, end <-chan struct{}) error {
		<-end
		return nil
	}))
	w := f.watch(interval, 300*time.Millisecond)
	w.until("available", w.is(states{vipA: vip.Ready, vipB: vip.Ready}), nil)
	end := w.at.LeaseEnd
	unchanged := func(u readiness.Update) {
		if !u.LeaseEnd.Equal(end) {
			t.Fatalf("the lease ends at %v, want %v", u.LeaseEnd, end)
		}
	}
	for failures := range uint64(2) {
		w.until("failed probe", func() bool { return w.client.Stats().Failures > failures }, unchanged)
		added := vip.Require(fmt.Sprintf("20.0.1.%d/32", failures))
		w.vips.Set([]vip.VIP{vipA, added})
		w.until("other VIPs", w.is(states{vipA: vip.Ready, added: vip.Ready}), unchanged)
	}
}

// The load balancer is available if one of its targets has exactly the identifier of this pod.
func TestIdentifierOfThisPod(t *testing.T) {
	type identifiers []map[string]string
	own, key := map[string]string{"identifier": host}, "identifier"
	other := map[string]string{key: strings.Repeat("x", len(host))}
	for name, tt := range map[string]struct {
		targets   identifiers
		available bool
	}{
		"own":              {identifiers{own}, true},
		"own among others": {identifiers{other, own, other}, true},
		"same length":      {identifiers{other}, false},
		"prefix":           {identifiers{{key: host[:len(host)-1]}}, false},
		"longer":           {identifiers{{key: host + "x"}}, false},
		"other case":       {identifiers{{key: strings.ToUpper(host)}}, false},
		"empty":            {identifiers{{key: ""}}, false},
		"another key":      {identifiers{{"host": host}}, false},
		"no context":       {identifiers{nil}, false},
		"no target":        {nil, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			response := &loadbalancerv1.Response{}
			for _, context := range tt.targets {
				response.Targets = append(response.Targets, &loadbalancerv1.Target{Context: context})
			}
			f.serve(f.socket, func(r grpc.ServiceRegistrar) {
				loadbalancerv1.RegisterStreamAvailabilityServiceServer(r, constant{response: response})
			})
			want := vip.NotReady
			if tt.available {
				want = vip.Ready
			}
			w := f.watch(interval, within)
			w.until("synced", func() bool { return w.at.Synced }, nil)
			if !w.is(states{vipA: want, vipB: want})() {
				t.Errorf("states %v, want %v", w.ready, want)
			}
		})
	}
}

// constant is a load balancer that sends one response.
type constant struct {
	loadbalancerv1.UnimplementedStreamAvailabilityServiceServer
	response *loadbalancerv1.Response
}

func (c constant) Watch(_ *emptypb.Empty, s grpc.ServerStreamingServer[loadbalancerv1.Response]) error {
	if err := s.Send(c.response); err != nil {
		return err
	}
	<-s.Context().Done()
	return nil
}

// A change may reach one of the two connections earlier, so a single contradiction does not end the
// stream. It does not renew the lease either.
func TestSingleContradictions(t *testing.T) {
	f := newFixture(t)
	const probes = 6
	var first atomic.Pointer[time.Time] // the first probe that agrees
	f.serveScripted(&scripted{watch: func(n int64, send func(bool) error, end <-chan struct{}) error {
		switch {
		case n == 1:
			if err := send(true); err != nil {
				return err
			}
		case n == 2:
			if err := send(false); err != nil {
				return err
			}
		case n <= 2*probes:
			now := time.Now()
			first.CompareAndSwap(nil, &now)
			if err := send(n%2 == 1); err != nil { // the other state with every second probe
				return err
			}
		}
		<-end
		return nil
	}})
	w := f.watchState(20*time.Millisecond, within, 20*time.Millisecond)
	w.until("available", w.is(states{vipA: vip.Ready, vipB: vip.Ready}), nil)
	end := w.at.LeaseEnd
	w.until("many probes", func() bool { return w.client.Stats().Probes >= 2*probes }, func(u readiness.Update) {
		if !u.LeaseEnd.Equal(end) && first.Load() == nil { // read after the update
			t.Errorf("a contradiction moved the end of the lease from %v to %v", end, u.LeaseEnd)
		}
	})
	if s := w.Stats(); s.Streams != 1 || !w.is(states{vipA: vip.Ready, vipB: vip.Ready})() {
		t.Errorf("%d streams, %+v", s.Streams, w.at)
	}
}
