package frontend

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/frontend/directory"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/readinessfile"
	"github.com/vipgate/vipgate/pkg/task"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/trench/change"
	"github.com/vipgate/vipgate/pkg/vip"
)

var (
	_ readinessSource = (*readiness.Watcher)(nil)
	_ readinessSource = (*directory.Source)(nil)
	_ task.Task       = (*directory.Source)(nil)
)

// directoryFixture is a directory source with its received state.
type directoryFixture struct {
	*directory.Source
	t       *testing.T
	path    string
	inForce *latest.Value[*change.InForce]
	update  readiness.Update // merged
	state   map[vip.VIP]readiness.VIPReadiness
	gate    *gate.Gate
}

// set puts a configuration and VIPs that leave it in force.
func (s *directoryFixture) set(loaded trench.Loaded, leaving ...vip.VIP) {
	s.inForce.Set(s.inForce.Load().Next(loaded, vip.NewSet(leaving...), true))
}

func configOf(streams ...trench.Stream) trench.Loaded {
	return trench.Loaded{Config: &trench.Config{
		Attractor: trench.Attractor{VIPs: []vip.VIP{vipA, vipB}},
		Streams:   streams,
	}}
}

const (
	// liveness bounds every wait for a condition.
	liveness  = 20 * time.Second
	drainTime = time.Hour
)

func newDirectoryFixture(t *testing.T, path string, o readinessfile.Options) *directoryFixture {
	t.Helper()
	o.Path, o.Log = path, slog.New(slog.DiscardHandler)
	s := &directoryFixture{
		t: t, path: path, state: map[vip.VIP]readiness.VIPReadiness{},
		gate:    gate.New(gate.Options{NoFlapBackoff: true}),
		inForce: latest.New(&change.InForce{}),
	}
	s.set(configOf(trench.Stream{Name: "a", VIPs: []vip.VIP{vipA}}, trench.Stream{Name: "b", VIPs: []vip.VIP{vipB}}))
	s.gate.Configure([]vip.VIP{vipA, vipB})
	d := readinessfile.NewReader(o)
	s.Source = directory.New(d, s.inForce, drainTime, "instance")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- task.Run(ctx, d, s.Source) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return s
}

// wait takes updates until a condition holds.
func (s *directoryFixture) wait(what string, done func() bool) {
	s.t.Helper()
	deadline := time.NewTimer(liveness)
	defer deadline.Stop()
	for !done() {
		select {
		case <-s.Changed():
			u := s.Take()
			if u.Position.Revision < s.update.Position.Revision {
				s.t.Errorf("revision %d after %d", u.Position.Revision, s.update.Position.Revision)
			}
			s.gate.UpdateLB(time.Now(), lbUpdate(u, nil))
			if u.Complete {
				clear(s.state)
			}
			for _, r := range u.Changed {
				s.state[r.VIP] = r
			}
			s.update = u
		case <-deadline.C:
			s.t.Fatalf("never %s: %+v %+v", what, s.update, s.state)
		}
	}
}

func (s *directoryFixture) wantState(v vip.VIP, state vip.State, reason readinessv1.VipReason, detail string) {
	s.t.Helper()
	s.wait(v.String()+" "+state.String(), func() bool {
		w := s.state[v]
		return w.VIP == v && w.State == state && w.Reason == reason && strings.Contains(w.Detail, detail)
	})
}

const (
	reasonFile   = readinessv1.VipReason_VIP_REASON_READINESS_FILE
	reasonNoFile = readinessv1.VipReason_VIP_REASON_NO_READINESS_FILE
)

func TestDirectoryReadiness(t *testing.T) {
	s := newDirectoryFixture(t, t.TempDir(), readinessfile.Options{OnGone: readinessfile.Drop})
	s.wantState(vipA, vip.NotReady, reasonNoFile, "lb-ready-a")
	u := s.update
	if !u.Complete || !u.Synced || !u.Open || u.Position != (readiness.Position{
		InstanceID: "instance",
		Revision:   1,
	}) || len(u.Changed) != 2 || !monotonic(u.LeaseEnd) {
		t.Errorf("first update: %+v", u)
	}
	if err := os.WriteFile(filepath.Join(s.path, "lb-ready-a"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	since := s.state[vipA].Since
	s.wantState(vipA, vip.Ready, reasonFile, "lb-ready-a")
	if now := s.state[vipA].Since; !now.After(since) || !s.state[vipB].Since.Equal(since) {
		t.Errorf("%s changed at %v, not ready since %v; %s since %v", vipA, now, since, vipB, s.state[vipB].Since)
	}
	if u = s.update; !u.Complete || u.Position.Revision != 2 || u.ReceivedAt.IsZero() {
		t.Errorf("second update: %+v", u)
	}
	// Each scan renews the lease and has no other effect.
	end := s.update.LeaseEnd
	s.wait("renewed", func() bool { return s.update.LeaseEnd.After(end) })
	if u = s.update; u.Position.Revision != 2 || len(u.Changed) > 0 || !u.ReceivedAt.IsZero() {
		t.Errorf("a renewal: %+v", u)
	}
	if f := s.gate.Freshness(time.Now()); f != gate.Live {
		t.Errorf("freshness is %v", f)
	}
	// Without scans the lease expires.
	if f := s.gate.Freshness(s.update.LeaseEnd.Add(time.Second)); f == gate.Live {
		t.Errorf("freshness is %v", f)
	}

	// The trench file changes: b serves A as well, B is gone.
	c := configOf(trench.Stream{Name: "b", VIPs: []vip.VIP{vipA}})
	c.Config.Attractor.VIPs = []vip.VIP{vipA}
	s.set(c)
	s.wantState(vipA, vip.NotReady, reasonNoFile, "lb-ready-b")
	s.wait("a problem", func() bool {
		return s.update.Err != nil && strings.Contains(s.update.Err.Error(),
			`"lb-ready-a": the trench file has no stream`)
	})
	s.wait("without the removed VIP", func() bool { _, there := s.state[vipB]; return !there })
}

// A VIP that leaves the trench file keeps its readiness until the frontend has drained it.
func TestDirectoryOfLeavingVIP(t *testing.T) {
	s := newDirectoryFixture(t, t.TempDir(), readinessfile.Options{OnGone: readinessfile.Drop})
	if err := os.WriteFile(filepath.Join(s.path, "lb-ready-a"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	s.wantState(vipA, vip.Ready, reasonFile, "lb-ready-a")
	c := configOf(trench.Stream{Name: "b", VIPs: []vip.VIP{vipB}})
	c.Config.Attractor.VIPs = []vip.VIP{vipB}
	s.set(c, vipA)
	s.wait("a problem", func() bool {
		return s.update.Err != nil && strings.Contains(s.update.Err.Error(),
			`"lb-ready-a": the trench file has no stream`)
	})
	if is := s.state[vipA]; is.State != vip.Ready {
		t.Errorf("while it leaves: %+v", is)
	}
	s.set(c)
	s.wait("without the VIP", func() bool { _, there := s.state[vipA]; return !there })
}

// A ready VIP whose last stream leaves the trench file drains, as at a load balancer.
func TestDirectoryOfEndedVIP(t *testing.T) {
	s := newDirectoryFixture(t, t.TempDir(), readinessfile.Options{OnGone: readinessfile.Drop})
	both := configOf(trench.Stream{Name: "a", VIPs: []vip.VIP{vipA}}, trench.Stream{Name: "b", VIPs: []vip.VIP{vipB}})
	without := configOf(trench.Stream{Name: "b", VIPs: []vip.VIP{vipB}})
	if err := os.WriteFile(filepath.Join(s.path, "lb-ready-a"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		s.wantState(vipA, vip.Ready, reasonFile, "lb-ready-a")
		before := time.Now()
		s.set(without)
		s.wantState(vipA, vip.Draining, readinessv1.VipReason_VIP_REASON_LEAVING, "no stream")
		end := s.state[vipA].DrainEnd
		if !end.After(before.Add(drainTime-1)) || end.After(time.Now().Add(drainTime)) {
			t.Errorf("drains until %v", end)
		}
		// Another edit does not prolong the drain. The other VIP was not ready.
		revision := s.update.Position.Revision
		s.set(configOf(trench.Stream{Name: "c"}))
		s.wait("evaluated", func() bool { return s.update.Position.Revision > revision })
		if is := s.state[vipA]; is.State != vip.Draining || !is.DrainEnd.Equal(end) {
			t.Errorf("after another edit: %+v", is)
		}
		if is := s.state[vipB]; is.State != vip.NotReady || is.Reason != reasonNoFile {
			t.Errorf("never ready: %+v", is)
		}
		s.set(both)
	}
}

// The drain of a VIP without streams ends, with any later change.
func TestEndedVIPEnds(t *testing.T) {
	inForce := (&change.InForce{}).Next(configOf(trench.Stream{Name: "a", VIPs: []vip.VIP{vipA}}), nil, true)
	s := directory.New(readinessfile.NewReader(readinessfile.Options{
		Path: t.TempDir(), Log: slog.New(slog.DiscardHandler),
	}), latest.New(inForce), drainTime, "instance")
	begin, revision := time.Now(), uint64(0)
	for _, step := range []struct {
		at    time.Duration
		ready bool
		want  vip.State
	}{
		{0, true, vip.Ready},
		{1, false, vip.Draining},
		{2, false, vip.Draining},
		{drainTime, false, vip.Draining},
		{drainTime + 1, false, vip.NotReady},
		{drainTime + 2, false, vip.NotReady},
		{drainTime + 3, true, vip.Ready},
		{drainTime + 4, false, vip.Draining},
	} {
		revision++
		listing := readinessfile.Listing{Scanned: true, At: begin.Add(step.at), Revision: revision}
		if step.ready {
			listing.Files = map[string]struct{}{"lb-ready-a": {}}
			inForce = inForce.Next(configOf(trench.Stream{Name: "a", VIPs: []vip.VIP{vipA}}), nil, true)
		} else {
			inForce = inForce.Next(configOf(), nil, true)
		}
		s.Publish(listing.At, listing, inForce)
		if is := s.Take().Changed[0]; is.State != step.want {
			t.Errorf("after %v: %+v", step.at, is)
		}
	}
}

func TestMissingDirectoryIsNamed(t *testing.T) {
	t.Run("while its VIPs drain", func(t *testing.T) {
		s, path := publishGone(t, time.Hour)
		s.wantState(vipA, vip.Draining, reasonFile, path)
		if end := s.state[vipA].DrainEnd; end.IsZero() {
			t.Error("it drains without end")
		}
	})
	t.Run("after that", func(t *testing.T) {
		s, path := publishGone(t, 50*time.Millisecond)
		s.wantState(vipA, vip.NotReady, reasonNoFile, path+" does not exist")
		if s.update.Err == nil || !s.update.Synced {
			t.Errorf("%+v", s.update)
		}
	})
}

// publishGone returns a directory source whose directory was removed after a VIP became ready.
func publishGone(t *testing.T, drain time.Duration) (s *directoryFixture, path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "d")
	if err := os.Mkdir(path, 0o755); err != nil {
		t.Fatal(err)
	}
	s = newDirectoryFixture(t, path, readinessfile.Options{OnGone: readinessfile.Drain, DrainTime: drain})
	s.wantState(vipA, vip.NotReady, reasonNoFile, "lb-ready-a")
	if err := os.WriteFile(filepath.Join(path, "lb-ready-a"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	s.wantState(vipA, vip.Ready, reasonFile, "lb-ready-a")
	if err := os.Rename(path, path+".old"); err != nil {
		t.Fatal(err)
	}
	return s, path
}

// A new trench file is evaluated with the last listing, and does not renew the lease.
func TestOldListingRenewsNoLease(t *testing.T) {
	inForceWith := func(stream string) *change.InForce {
		return (&change.InForce{}).Next(configOf(trench.Stream{Name: stream, VIPs: []vip.VIP{vipA}}), nil, true)
	}
	s := directory.New(readinessfile.NewReader(readinessfile.Options{
		Path: t.TempDir(), Log: slog.New(slog.DiscardHandler),
	}), latest.New(inForceWith("a")), drainTime, "instance")
	now := time.Now()
	listing := readinessfile.Listing{Scanned: true, At: now.Add(-2 * time.Second), Revision: 1}
	s.Publish(now.Add(-2*time.Second), listing, inForceWith("a"))
	s.Take()
	s.Publish(now, listing, inForceWith("b"))
	u := s.Take()
	if want := listing.At.Add(readinessfile.MaxListingAge); !u.LeaseEnd.Equal(want) || !u.LastMessage.Equal(listing.At) {
		t.Errorf("the lease ends %v after the listing, want %v", u.LeaseEnd.Sub(listing.At), readinessfile.MaxListingAge)
	}
	if !u.Complete || u.Position.Revision != 2 || !u.ReceivedAt.Equal(now) {
		t.Errorf("update %+v", u)
	}
}
