package lb

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/outage"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/registry"
	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

var quiet = slog.New(slog.DiscardHandler)

// newLoop returns a loop whose sources are the trench file and the registry, and
// whose tasks do not run.
func newLoop(t *testing.T, o TargetOptions) *loop {
	t.Helper()
	reg, err := registry.New(registry.Options{Log: quiet})
	if err != nil {
		t.Fatal(err)
	}
	drains, err := targetset.OpenDrains(filepath.Join(t.TempDir(), drainsFile), quiet)
	if err != nil {
		t.Fatal(err)
	}
	o.Sources = Sources{File: true, Registry: true}
	outages := outage.New(outage.Options{})
	return &loop{
		sources: newSources(o, reg, drains), checker: healthcheck.New(healthcheck.Options{Log: quiet}),
		index: targetset.NewIndex(), table: readiness.NewTable(readiness.TableOptions{}), log: quiet,
		observe: func(readiness.Decision) {}, outages: outages,
		started: time.Now(), aggregate: newAggregate(outages), before: map[vip.VIP]readiness.State{},
	}
}

func oneStream(vips ...vip.VIP) *trench.Config {
	return &trench.Config{
		Attractor: trench.Attractor{VIPs: vips},
		Streams: []trench.Stream{{
			Name: "s", VIPs: vips, MinReady: 1, DrainTime: time.Minute,
			Check:   trench.Check{TCP: trench.TCPCheck{Port: 1}, Interval: time.Second, Timeout: time.Second, Rise: 1, Fall: 1},
			Targets: []trench.Target{{Name: "a", IPs: []netip.Addr{netip.MustParseAddr("172.16.0.1")}}},
		}},
	}
}

func (l *loop) live() bool { return l.sources.file.State().Live }

func TestGoodFileThatABadOneFollowsAtOnceIsInForce(t *testing.T) {
	l := newLoop(t, TargetOptions{})
	l.evaluate(l.load(trench.Loaded{Config: oneStream(vipA), Generation: 1}))
	// Both were read before the loop came to look: it sees only the newest.
	l.evaluate(l.load(trench.Loaded{Config: oneStream(vipA, vipB), Generation: 2, Err: errors.New("no such file")}))
	if _, judged := l.aggregate.current[vipB]; !judged {
		t.Error("the configuration in force is not that of the loop")
	}
	if l.live() {
		t.Error("the file is gone, and its source does not say so")
	}
	l.evaluate(l.load(trench.Loaded{Config: oneStream(vipA, vipB), Generation: 2}))
	if !l.live() {
		t.Error("the file is back, and its source does not say so")
	}
}

func TestFileThatIsGoneAtTheStartIsKnown(t *testing.T) {
	l := newLoop(t, TargetOptions{OnFileGone: targetset.Drop})
	l.evaluate(l.load(trench.Loaded{Config: oneStream(vipA), Generation: 1, Err: errors.New("no such file")}))
	if l.live() || len(l.index.List(nil)) != 0 {
		t.Errorf("live %v, with %v", l.live(), l.index.List(nil))
	}
}

func TestManyTargetsOfOneStreamAreShownInOnePass(t *testing.T) {
	const n = 20_000
	l := newLoop(t, TargetOptions{})
	var members []targetset.Member
	var changed []healthcheck.Health
	for i := range n {
		m := targetset.Member{Name: fmt.Sprint(i), IPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})}}
		members = append(members, m)
		changed = append(changed, healthcheck.Health{Key: healthcheck.Key{Stream: "s", Name: m.Name, Addr: m.IPs[0]}, State: healthcheck.Ready})
	}
	l.aggregate.configure(time.Now(), oneStream(vipA), func(string) []targetset.Member { return members })
	l.aggregate.apply(healthcheck.Evaluation{Changed: changed}, vip.Set{})
	// A pass over the stream for each of them would be 400 million steps.
	l.publish(targetset.Changes{}, nil, changed)
	if got := len(l.index.List(nil)); got != n {
		t.Errorf("%d targets are shown, want %d", got, n)
	}
}

func TestVIPThatDrainsTellsOfTheStreamThatDrains(t *testing.T) {
	r := newRig(t)
	r.set("two", 0, "172.16.0.1", healthcheck.Ready)
	r.drain("two", 0, time.Minute)
	if got := r.a.current[vipA]; got.State != readiness.Draining || got.Detail != "stream two: 0 of 1 targets ready, 1 draining, needs 1" {
		t.Errorf("%v: %s", got.State, got.Detail)
	}
}
