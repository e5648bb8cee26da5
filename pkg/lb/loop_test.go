package lb

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/serving"
	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	vipA = vip.Require("20.0.0.1/32")
	vipB = vip.Require("20.0.0.2/32")
)

var quiet = slog.New(slog.DiscardHandler)

// newLoop returns a loop whose sources are the trench file and the registry, and
// whose tasks do not run.
func newLoop(t testing.TB, o TargetOptions) *loop {
	t.Helper()
	o.File, o.StateDir = true, t.TempDir()
	sources, err := newSources(o, quiet)
	if err != nil {
		t.Fatal(err)
	}
	return &loop{
		sources: sources, checker: healthcheck.New(healthcheck.Options{Log: quiet}),
		index: targetset.NewIndex(), table: readiness.NewTable(readiness.TableOptions{}), log: quiet,
		observe: func(readiness.Decision, uint64) {}, evaluator: serving.New(serving.Options{}),
	}
}

func oneStream(vips ...vip.VIP) *trench.Config {
	return &trench.Config{
		Attractor: trench.Attractor{VIPs: vips},
		Streams: []trench.Stream{{
			Name: "s", VIPs: vips, MinReady: 1, DrainTime: time.Minute,
			Check: trench.Check{
				SingleCheck: trench.SingleCheck{
					TCP: trench.TCPCheck{Port: 1}, Interval: time.Second, Timeout: time.Second, Rise: 1, Fall: 1,
				},
			},
			Targets: []trench.Target{{Name: "a", IPs: []netip.Addr{netip.MustParseAddr("172.16.0.1")}}},
		}},
	}
}

func (l *loop) live() bool { return l.sources.file.State().Live }

func TestGoodFileBeforeBadOneIsInForce(t *testing.T) {
	l := newLoop(t, TargetOptions{})
	l.evaluate(l.load(trench.Loaded{Config: oneStream(vipA), Generation: 1}))
	// Both were read before the loop loaded the newest.
	l.evaluate(l.load(trench.Loaded{Config: oneStream(vipA, vipB), Generation: 2, Err: errors.New("no such file")}))
	if vips := l.table.State().VIPs; len(vips) != 2 || vips[1].VIP != vipB {
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

func TestFileGoneAtStart(t *testing.T) {
	l := newLoop(t, TargetOptions{OnFileGone: targetset.Drop})
	l.evaluate(l.load(trench.Loaded{Config: oneStream(vipA), Generation: 1, Err: errors.New("no such file")}))
	if l.live() || len(l.index.List(nil)) != 0 {
		t.Errorf("live %v, with %v", l.live(), l.index.List(nil))
	}
}

func TestConfiguredOnce(t *testing.T) {
	l := newLoop(t, TargetOptions{})
	calls := 0
	l.configured = func() {
		calls++
		if targets := l.index.List(nil); len(targets) != 1 {
			t.Errorf("called with the targets %v", targets)
		}
	}
	l.evaluate(l.load(trench.Loaded{Err: errors.New("no such file")}))
	if calls != 0 {
		t.Error("called without a configuration")
	}
	l.evaluate(l.load(trench.Loaded{Config: oneStream(vipA), Generation: 1}))
	l.evaluate(l.load(trench.Loaded{Config: oneStream(vipA, vipB), Generation: 2}))
	if calls != 1 {
		t.Errorf("called %d times", calls)
	}
}

// The readiness loop is overdue once an evaluation blocks, and not while it waits.
func TestHungLoopIsOverdue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLoop(t, TargetOptions{})
		loaded := latest.New(trench.Loaded{Config: oneStream(vipA), Generation: 1})
		l.config, l.away, l.ready, l.lease = loaded, latest.New(false), make(chan struct{}), time.Second
		hang, hung := make(chan struct{}), atomic.Bool{}
		l.observe = func(readiness.Decision, uint64) {
			if hung.Load() {
				<-hang
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- l.Run(ctx) }()
		<-l.ready
		for range 60 {
			<-time.After(time.Second)
			if got := l.Overdue(); got > time.Second {
				t.Errorf("overdue by %v while it waits", got)
			}
		}
		hung.Store(true)
		loaded.Set(trench.Loaded{Config: oneStream(vipA, vipB), Generation: 2})
		<-time.After(time.Minute)
		if got := l.Overdue(); got < 58*time.Second {
			t.Errorf("overdue by %v after it has been blocked for a minute", got)
		}
		close(hang)
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}

// An edit of a check changes no VIP if the targets pass the new one.
func TestEditOfCheck(t *testing.T) {
	l := newLoop(t, TargetOptions{})
	checker := healthcheck.New(healthcheck.Options{Log: quiet})
	l.checker = checker
	harness.Run(t, checker.Run)
	var changes []readiness.VIPReadiness
	l.observe = func(decision readiness.Decision, _ uint64) { changes = append(changes, decision.Changed...) }
	var ports [2]uint16
	for i := range ports {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		harness.Must(t, err)
		defer listener.Close()
		ports[i] = uint16(listener.Addr().(*net.TCPAddr).Port)
	}
	for i, port := range ports {
		config := oneStream(vipA)
		config.Streams[0].Check.TCP.Port = port
		config.Streams[0].Targets[0].IPs[0] = netip.MustParseAddr("127.0.0.1")
		edited := time.Now()
		l.evaluate(l.load(trench.Loaded{Config: config, Generation: uint64(i + 1)}))
		for health := checker.List()[0]; !health.Since.After(edited) || health.State != healthcheck.Ready; {
			<-checker.Changed()
			l.evaluate(input{})
			health = checker.List()[0]
		}
		l.evaluate(input{})
		if n := len(changes); n == 0 || changes[n-1].State != vip.Ready || i > 0 && n > 1 {
			t.Fatalf("after check %d the changes are %+v", i+1, changes)
		}
		changes = changes[len(changes)-1:]
	}
}

func TestLeaseIsBounded(t *testing.T) {
	for lease, want := range map[time.Duration]string{
		minLease - 1: "lease 19.999999ms is too short", minLease: "", minLease + 1: "", readiness.MaxLease - 1: "",
		readiness.MaxLease: "", readiness.MaxLease + 1: "is longer than 1m0s",
	} {
		if err := ValidateLease(lease); (err != nil) != (want != "") || !strings.Contains(fmt.Sprint(err), want) {
			t.Errorf("%v: %v, want %q", lease, err, want)
		}
	}
}
