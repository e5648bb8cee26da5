package probe

import (
	"context"
	"encoding/json"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/trench"
	trenchfile "github.com/vipgate/vipgate/pkg/trench/file"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func options() Options {
	return Options{
		Log: slog.New(slog.DiscardHandler), Interval: 20 * time.Millisecond, Timeout: 200 * time.Millisecond,
		Fall: 2, Rate: 1e6, Ports: 2, First: 29_000,
	}
}

func tcp(port int) trench.Check {
	return trench.Check{SingleCheck: trench.SingleCheck{TCP: trench.TCPCheck{Port: uint16(port)}}}
}

// run probes until the test ends.
func run(t *testing.T, prober *Prober) {
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = prober.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
	})
}

// wantState waits until the first VIP has a state.
func wantState(t *testing.T, prober *Prober, want State) Report {
	t.Helper()
	deadline := time.After(10 * time.Second)
	for {
		report := prober.Report(time.Now())
		if report.VIPs[0].State == want {
			return *report
		}
		select {
		case <-prober.Changed():
		case <-time.After(10 * time.Millisecond):
		case <-deadline:
			t.Fatalf("want %s\n%s", want, report.Table())
		}
	}
}

// loopback returns a target at a loopback address, which no VIP can have.
func loopback(prober *Prober, check trench.Check) {
	t := prober.target(Target{VIP: vip.Require("20.0.0.1/32"), Checks: []trench.Check{check}})
	t.address = netip.MustParseAddr("127.0.0.1")
	prober.targets = []*target{t}
	for _, path := range t.paths {
		prober.schedule.Push(path)
	}
}

func TestStatesOfAVIP(t *testing.T) {
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	harness.Must(t, err)
	port := listener.Addr().(*net.TCPAddr).Port
	prober := New(options())
	loopback(prober, tcp(port))
	if state := prober.Report(time.Now()).State(); state != Unknown {
		t.Errorf("before the first check: %s", state)
	}
	run(t, prober)
	report := wantState(t, prober, Reachable)
	if report.VIPs[0].Latency <= 0 {
		t.Errorf("latency %v", report.VIPs[0].Latency)
	}
	harness.Must(t, listener.Close())
	report = wantState(t, prober, Dead)
	for _, path := range report.VIPs[0].Paths {
		if path.State == Dead && !strings.Contains(path.Reason, "refused") {
			t.Errorf("path %+v", path)
		}
	}
}

// Checks over datagrams leave from the source port of the path, too.
func TestDatagramCheck(t *testing.T) {
	server, err := (&net.ListenConfig{}).ListenPacket(t.Context(), "udp", "127.0.0.1:0")
	harness.Must(t, err)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		request := make([]byte, 64)
		for {
			n, from, err := server.ReadFrom(request)
			if err != nil {
				return
			}
			if port := from.(*net.UDPAddr).Port; port == 29_000 || port == 29_001 {
				_, _ = server.WriteTo(request[:n], from)
			}
		}
	}()
	prober := New(options())
	port := uint16(server.LocalAddr().(*net.UDPAddr).Port)
	loopback(prober, trench.Check{
		SingleCheck: trench.SingleCheck{UDP: trench.UDPCheck{Port: port, Send: "ping", Expect: "ping"}},
	})
	run(t, prober)
	wantState(t, prober, Reachable)
	harness.Must(t, server.Close())
	<-ended
	for _, path := range wantState(t, prober, Dead).VIPs[0].Paths {
		if path.State == Dead && !strings.Contains(path.Reason, "port unreachable") {
			t.Errorf("path %+v", path)
		}
	}
}

// A path that cannot be checked is unknown, after its verdict has expired: neither good nor dead.
func TestUnknownWithoutSource(t *testing.T) {
	o := options()
	o.Sources = []netip.Addr{netip.MustParseAddr("192.0.2.77")}
	prober := New(o)
	prober.Update(List([]vip.VIP{vip.Require("20.0.0.1/32")}, tcp(5000)))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); _ = prober.Run(ctx) }()
	prober.Wait(ctx)
	report := prober.Report(time.Now())
	cancel()
	<-done
	path := report.VIPs[0].Paths[0]
	if report.State() != Unknown || !strings.Contains(path.Reason, "source address") {
		t.Errorf("%s\n%s", report.State(), report.Table())
	}
}

func TestVerdictsExpire(t *testing.T) {
	prober := New(options())
	prober.Update(List([]vip.VIP{vip.Require("20.0.0.1/32")}, tcp(5000)))
	path, now := prober.targets[0].paths[0], time.Now()
	notRun := healthcheck.Result{NotRun: true, Reason: "too many open files"}
	prober.apply(path, healthcheck.Result{Passed: true, Took: time.Millisecond}, now)
	prober.apply(path, notRun, now.Add(time.Millisecond))
	for after, want := range map[time.Duration]State{prober.valid(): Reachable, prober.valid() + 1: Unknown} {
		if got := path.report(now.Add(after), prober.valid()); got.State != want ||
			want == Unknown && got.Reason != notRun.Reason {
			t.Errorf("after %v: %+v, want %s", after, got, want)
		}
	}
	// Dead needs two failures, and one success ends it.
	failed := healthcheck.Result{Reason: "port 5000: no answer"}
	for i, want := range []State{Reachable, Dead, Dead} {
		if prober.apply(path, failed, now); path.verdict != want {
			t.Errorf("after %d failures: %s", i+1, path.verdict)
		}
	}
	if prober.apply(path, healthcheck.Result{Passed: true}, now); path.verdict != Reachable || path.failures != 0 {
		t.Errorf("after a success: %s, %d", path.verdict, path.failures)
	}
}

// Verdicts hold as long as the checks of all streams of a VIP may take, one after the other.
func TestVerdictsOfManyChecks(t *testing.T) {
	var members trench.Check
	problems := trenchfile.Decode(map[string]any{"any": []any{
		map[string]any{"tcp": map[string]any{"port": 1}},
		map[string]any{"tcp": map[string]any{"port": 2}},
		map[string]any{"tcp": map[string]any{"port": 3}},
	}}, &members)
	if len(problems) > 0 {
		t.Fatal(problems)
	}
	prober := New(options())
	one := prober.Valid()
	for i, c := range []struct {
		checks []trench.Check
		want   time.Duration // number of timeouts
	}{
		{[]trench.Check{tcp(1)}, 1},
		{[]trench.Check{tcp(1), tcp(2)}, 2},
		{[]trench.Check{tcp(1), members}, 4},
		{nil, 1},
	} {
		prober.Update([]Target{
			{VIP: vip.Require("20.0.0.1/32"), Checks: c.checks},
			{VIP: vip.Require("20.0.0.2/32"), Checks: []trench.Check{tcp(1)}},
		})
		if got := prober.Valid() - one; got != (c.want-1)*prober.Timeout {
			t.Errorf("step %d: %v longer", i+1, got)
		}
	}
}

// With more checks than the rate allows, the interval is longer, and verdicts hold for longer.
func TestRateBoundsChecks(t *testing.T) {
	o := options()
	o.Interval, o.Rate, o.Ports = time.Second, 4000, 4
	prober := New(o)
	var vips []vip.VIP
	for i := range 10_000 {
		vips = append(vips, vip.Require(netip.AddrFrom4([4]byte{20, 0, byte(i >> 8), byte(i)}).String()+"/32"))
	}
	prober.Update(List(vips, tcp(5000)))
	if prober.interval != 10*time.Second || len(prober.schedule) != 40_000 {
		t.Errorf("interval %v, %d paths", prober.interval, len(prober.schedule))
	}
	// A VIP that stays keeps its paths.
	kept := prober.targets[0]
	prober.Update(List(vips[:1], tcp(5000)))
	if prober.targets[0] != kept || len(prober.schedule) != 4 || prober.interval != time.Second {
		t.Errorf("%d paths, interval %v", len(prober.schedule), prober.interval)
	}
	prober.Update(List(vips[:1], tcp(5001)))
	if prober.targets[0] == kept || len(prober.schedule) != 4 {
		t.Errorf("the check changed: %d paths", len(prober.schedule))
	}
}

func TestTargetsOfATrench(t *testing.T) {
	v4, v6, other := vip.Require("20.0.0.1/32"), vip.Require("2000::1/128"), vip.Require("20.0.0.9/32")
	streams := func(changes ...func(*trench.Stream)) (all []trench.Stream) {
		for i, change := range changes {
			s := trench.Stream{Name: string(rune('a' + i)), VIPs: []vip.VIP{v4, v6}, Check: tcp(5000)}
			change(&s)
			all = append(all, s.Complete())
		}
		return all
	}
	same := func(*trench.Stream) {}
	for name, c := range map[string]struct {
		streams []trench.Stream
		checks  int // of the IPv4 VIP
		reason  string
	}{
		"one":         {streams(same), 1, ""},
		"equal":       {streams(same, func(s *trench.Stream) { s.Check.Fall = 9 }), 1, ""},
		"different":   {streams(same, func(s *trench.Stream) { s.Check = tcp(1) }), 2, ""},
		"no check":    {streams(func(s *trench.Stream) { s.Check = trench.Check{} }), 0, "stream a: it has no check"},
		"via address": {streams(func(s *trench.Stream) { s.Check.Via = trench.ViaAddress }), 0, "via address"},
		"family":      {streams(func(s *trench.Stream) { s.Check.Families = trench.OnlyIPv6 }), 0, "for ipv6 only"},
		"match": {streams(func(s *trench.Stream) {
			s.Match = []trench.Match{
				{Protocols: []string{"udp"}, Ports: []uint16{5000}}, {Protocols: []string{"tcp"}, Ports: []uint16{80}},
			}
		}), 0, "lacks TCP port 5000"},
		"matched": {streams(func(s *trench.Stream) {
			s.Match = []trench.Match{{Protocols: []string{"udp", "tcp"}, Ports: []uint16{80, 5000}}}
		}), 1, ""},
		"none": {nil, 0, "no stream serves it"},
	} {
		targets := Targets(&trench.Config{
			Attractor: trench.Attractor{VIPs: []vip.VIP{v6, other, v4}}, Streams: c.streams,
		})
		if len(targets) != 3 || targets[0].VIP != v4 || targets[2].VIP != v6 || len(targets[0].Checks) != c.checks ||
			!strings.Contains(targets[0].Unchecked, c.reason) || (targets[0].Unchecked == "") != (c.reason == "") {
			t.Errorf("%s: %+v", name, targets)
		}
	}
}

func TestReportTexts(t *testing.T) {
	report := &Report{Dead: 1, Unknown: 1, VIPs: []VIP{
		{VIP: vip.Require("20.0.0.1/32"), State: Partial, Latency: 0.0012, Paths: []Path{
			{Source: "0.0.0.0:31000", State: Reachable, Latency: 0.0012},
			{Source: "0.0.0.0:31001", State: Dead, Reason: "port 80: no answer in 500ms", LastHop: "10.0.0.1 (hop 1)"},
			{Source: "0.0.0.0:31002", State: Unknown, Reason: "check not run: too many open files"},
		}},
		{VIP: vip.Require("2000::1/128"), Family: vip.IPv6, State: Unknown, Reason: "no stream serves it"},
	}}
	const want = `VIP                   STATE    PATHS   LATENCY  REASON
20.0.0.1/32           partial  1 of 3  1.2ms    
  from 0.0.0.0:31001  dead                      port 80: no answer in 500ms; last answer: 10.0.0.1 (hop 1)
  from 0.0.0.0:31002  unknown                   check not run: too many open files
2000::1/128           unknown  0 of 0  -        no stream serves it
`
	if got := report.Table(); got != want {
		t.Errorf("got\n%s", got)
	}
	text, err := report.JSON()
	harness.Must(t, err)
	var read struct{ VIPs []struct{ State string } }
	harness.Must(t, json.Unmarshal([]byte(text), &read))
	if read.VIPs[0].State != "partial" || report.State() != Dead {
		t.Errorf("%s: %s", report.State(), text)
	}
	report.Dead = 0
	if report.State() != Unknown {
		t.Errorf("%s", report.State())
	}
}

// FuzzOffender reads control messages of the kernel.
func FuzzOffender(f *testing.F) {
	f.Add([]byte{})
	f.Add(slices.Repeat([]byte{0xff}, 64))
	message := make([]byte, unix.CmsgSpace(32))
	message[0], message[12] = 48, unix.IP_RECVERR
	message[16+16] = unix.AF_INET
	f.Add(message)
	f.Fuzz(func(_ *testing.T, control []byte) { _, _, _ = offender(control) })
}
