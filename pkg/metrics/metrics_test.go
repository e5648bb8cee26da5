package metrics

import (
	"context"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	dto "github.com/prometheus/client_model/go"
	"go.uber.org/goleak"
	"google.golang.org/grpc"

	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// services is a server with services.
type services map[string]grpc.ServiceInfo

func (s services) GetServiceInfo() map[string]grpc.ServiceInfo { return s }

var served = services{
	"vipgate.x.v1.XService":     {Methods: []grpc.MethodInfo{{Name: "Get"}, {Name: "Watch", IsServerStream: true}}},
	"grpc.health.v1.Health":     {Methods: []grpc.MethodInfo{{Name: "Check"}}},
	"grpc.channelz.v1.Channelz": {Methods: []grpc.MethodInfo{{Name: "GetServers"}}},
}

// fullFrontend returns metrics that all have a value.
func fullFrontend() *Frontend {
	f := NewFrontend("1.2.3")
	f.Configuration(true)
	f.Stale(time.Minute)
	f.Held(3)
	f.Reload(true)
	f.Identity("spiffe://td/frontend", time.Unix(2_000_000_000, 0))
	f.Health("Readiness", true, true)
	f.LostLines(func() uint64 { return 3 })
	f.LostTraces(func() uint64 { return 0 })
	f.Serves(served)
	f.VIPs(func() []VIP {
		return []VIP{
			{VIP: vip.Require("20.0.0.1/32"), State: "announced", Reason: "ready", Policy: 1, PolicyState: "ready"},
			{VIP: vip.Require("20.0.0.2/32"), State: "withdrawn", Reason: "lb_not_ready"},
			{VIP: vip.Require("2000::1/128"), State: "depreferred", Reason: "stopping"},
		}
	})
	f.Count(Transition{To: "announced", Reason: "ready", Changed: true}, 1)
	f.DecisionLatency(100 * time.Microsecond)
	f.ControlLatency(30 * time.Microsecond)
	f.State(func() FrontendState {
		return FrontendState{
			Sessions: 2, Repairs: 1,
			Stream: &Stream{
				Live: true, LeaseEnd: time.Now().Add(time.Hour), LastMessage: time.Now(), Reconnects: 3, Moves: 4,
			},
			BIRD: BIRD{Up: true, Restarts: 1, Configures: 5, Configured: true, Refusals: 2, Gateways: []Gateway{
				{
					Name: "gateway-a-1", Family: "ipv4", Up: true, Since: time.Now().Add(-time.Minute),
					Imported: 1, Exported: 2,
				},
				{Name: "gateway-a-2", Family: "ipv6", Since: time.Now().Add(-time.Minute)},
			}},
		}
	})
	f.Registry().MustRegister(NewMeridio(func() Meridio {
		return Meridio{Connected: true, Refused: map[string]int{"VIP": 1, "gateway": 0}}
	}))
	return f
}

// fullLB returns metrics that all have a value.
func fullLB() *LB {
	l := NewLB("1.2.3")
	l.Configuration(false)
	l.Stale(0)
	l.Held(0)
	l.Reload(false)
	l.Identity("spiffe://td/lb", time.Unix(2_000_000_000, 0))
	l.Health("Readiness", false, true)
	l.Serves(served)
	l.VIPs(func() []VIP {
		return []VIP{
			{VIP: vip.Require("20.0.0.1/32"), State: "ready", Reason: "targets_ready", Ready: 2, Total: 2},
			{VIP: vip.Require("20.0.0.2/32"), State: "not ready", Reason: "too_few_ready", Ready: 1, Total: 3},
		}
	})
	l.Count(Transition{To: "ready", Reason: "targets_ready", Changed: true}, 1)
	l.Frontend(true, 1)
	l.Targets(func() Targets {
		return Targets{
			States: map[string]int{"ready": 2, "not ready": 1}, Rejections: 3,
			Sources: []Source{{Name: "file", Live: true, Targets: 3, Problems: 1}, {Name: "registry"}},
		}
	})
	l.Probes(func() Probes {
		return Probes{Probes: []ProbeLease{{"spiffe://td/probe", true, 3, 1}}, Suspects: 1, Refused: 2}
	})
	l.DataPlane(func() DataPlane {
		return DataPlane{
			Targets: map[string]int{"serving": 2, "pending": 1}, Drift: 1, Problems: 2, Held: 1, Failures: 3,
			Repairs: 4, Unmatched: map[string]uint64{"s": 5}, FastPath: map[bool]int{true: 2, false: 1},
			Moved: map[string]uint64{"asked": 6},
		}
	})(time.Millisecond)
	return l
}

// fullKube returns metrics that all have a value.
func fullKube() *Kube {
	k := NewKube("1.2.3", func() KubeState {
		return KubeState{
			Writes: 2, WriteFailures: 1, APIErrors: 4, Written: time.Unix(2_000_000_000, 0),
			Stale: time.Second, Objects: map[string]int{"Pods": 5}, Refused: map[string]int{"Service": 1},
		}
	})
	k.Health("Readiness", true, true)
	k.Serves(served)
	k.PublicationWrite("services", "written")
	k.Leader(true)
	k.Translated(time.Millisecond)
	k.Written(time.Millisecond)
	return k
}

// fullTarget returns metrics that all have a value.
func fullTarget() *Target {
	return NewTarget("1.2.3", func() TargetState {
		return TargetState{
			Complete: true, Problems: 1, Repairs: 2, Live: 3, Gone: 1, Dropped: 4, Flows: map[string]int{"02:00:00:00:00:01": 5},
		}
	})
}

func fullProbe() *Probe {
	return NewProbe("1.2.3", func() ProbeState {
		return ProbeState{
			Reachable: 1, Dead: 300, Reports: []ProbeReports{{"10.0.0.1:7790", true, 2}}, VIPs: []ProbedVIP{
				{"20.0.0.1/32", "ipv4", 1, 0.001, []DeadPath{{"0.0.0.0:31000", "10.0.0.1 (hop 1)"}}},
			},
		}
	})
}

// The series of dead paths are bounded, and the rest is counted.
func TestDeadPathsAreBounded(t *testing.T) {
	state := ProbeState{}
	for i := range 10_000 {
		v := ProbedVIP{VIP: strconv.Itoa(i), Family: "ipv4"}
		for port := range 8 {
			v.DeadPaths = append(v.DeadPaths, DeadPath{Source: strconv.Itoa(port)})
		}
		state.VIPs = append(state.VIPs, v)
	}
	registry := NewProbe("1.2.3", func() ProbeState { return state }).Registry()
	if n := len(series(t, registry, probeDeadPath)); n != maxDeadPaths {
		t.Errorf("%d series of dead paths, want %d", n, maxDeadPaths)
	}
	wantSeries(t, registry, probeDeadPathsOmitted, map[string]float64{"": 80_000 - maxDeadPaths})
}

// gather returns the metric families of a scrape by name.
func gather(t *testing.T, g prometheus.Gatherer) map[string]*dto.MetricFamily {
	t.Helper()
	families, err := g.Gather()
	harness.Must(t, err)
	byName := map[string]*dto.MetricFamily{}
	for _, f := range families {
		byName[f.GetName()] = f
	}
	return byName
}

// series returns the gauges and counters of a metric by their labels, such as "family=ipv4
// vip=20.0.0.1/32".
func series(t *testing.T, g prometheus.Gatherer, metric Metric) map[string]float64 {
	t.Helper()
	values := map[string]float64{}
	for _, m := range gather(t, g)[metric.Name].GetMetric() {
		var labels []string
		for _, l := range m.GetLabel() {
			labels = append(labels, l.GetName()+"="+l.GetValue())
		}
		values[strings.Join(labels, " ")] = m.GetGauge().GetValue() + m.GetCounter().GetValue()
	}
	return values
}

func wantSeries(t *testing.T, g prometheus.Gatherer, metric Metric, want map[string]float64) {
	t.Helper()
	if d := cmp.Diff(want, series(t, g, metric)); d != "" {
		t.Errorf("%s (-want +got):\n%s", metric.Name, d)
	}
}

func TestPromlint(t *testing.T) {
	for name, r := range map[string]prometheus.Gatherer{
		"frontend": fullFrontend().Registry(),
		"lb":       fullLB().Registry(),
		"kube":     fullKube().Registry(),
		"target":   fullTarget().Registry(),
		"probe":    fullProbe().Registry(),
	} {
		var families []*dto.MetricFamily
		for _, f := range gather(t, r) {
			if isOwn(f.GetName()) {
				families = append(families, f)
			}
		}
		problems, err := promlint.NewWithMetricFamilies(families).Lint()
		harness.Must(t, err)
		for _, p := range problems {
			t.Errorf("%s: %s: %s", name, p.Metric, p.Text)
		}
	}
}

func TestMetricDescriptions(t *testing.T) {
	scraped := gather(t, fullFrontend().Registry())
	maps.Copy(scraped, gather(t, fullLB().Registry()))
	maps.Copy(scraped, gather(t, fullKube().Registry()))
	maps.Copy(scraped, gather(t, fullTarget().Registry()))
	maps.Copy(scraped, gather(t, fullProbe().Registry()))
	described := map[string]bool{}
	for _, m := range All() {
		if described[m.Name] {
			t.Errorf("%s is described twice", m.Name)
		}
		described[m.Name] = true
		f := scraped[m.Name]
		if f == nil {
			t.Errorf("%s is described and does not exist", m.Name)
			continue
		}
		if got := Type(strings.ToLower(f.GetType().String())); got != m.Type {
			t.Errorf("%s is a %s, described as a %s", m.Name, got, m.Type)
		}
		var labels []string
		for _, l := range f.GetMetric()[0].GetLabel() {
			labels = append(labels, l.GetName())
		}
		want := slices.Sorted(slices.Values(m.Labels))
		if !slices.Equal(labels, want) {
			t.Errorf("%s has labels %v, described with %v", m.Name, labels, want)
		}
	}
	for name := range scraped {
		if isOwn(name) && !described[name] {
			t.Errorf("%s exists and is not described", name)
		}
	}
	for _, name := range constants(t) {
		if !described[name] {
			t.Errorf("%s is a constant and not described", name)
		}
	}
	for _, standard := range []string{"go_goroutines", "process_start_time_seconds"} {
		if scraped[standard] == nil {
			t.Errorf("%s is missing", standard)
		}
	}
}

// isOwn reports whether a metric is defined by vipgate and not by the standard collectors.
func isOwn(name string) bool {
	return strings.HasPrefix(name, "vipgate_") || strings.HasPrefix(name, "grpc_server_")
}

// constants returns the metric names in names.go.
func constants(t *testing.T) []string {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), "names.go", nil, 0)
	harness.Must(t, err)
	var names []string
	ast.Inspect(file, func(n ast.Node) bool {
		if lit, is := n.(*ast.BasicLit); is && lit.Kind == token.STRING {
			if s, err := strconv.Unquote(lit.Value); err == nil && isOwn(s) {
				names = append(names, s)
			}
		}
		return true
	})
	if len(names) < 20 {
		t.Fatalf("found only %d names", len(names))
	}
	return names
}

func TestNamesAreConstants(t *testing.T) {
	for _, file := range []string{"frontend.go", "kube.go", "lb.go", "process.go", "vips.go", "server.go"} {
		f, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
		harness.Must(t, err)
		ast.Inspect(f, func(n ast.Node) bool {
			if lit, is := n.(*ast.BasicLit); is && (strings.Contains(lit.Value, "vipgate_") ||
				strings.Contains(lit.Value, "grpc_server_")) {
				t.Errorf("%s: %s", file, lit.Value)
			}
			return true
		})
	}
}

func TestFrontendVIPs(t *testing.T) {
	f := NewFrontend("1")
	a, b := vip.Require("20.0.0.1/32"), vip.Require("2000::1/128")
	now := []VIP{{VIP: a, State: "withdrawn", Reason: "no_gateway"}, {VIP: b, State: "announced", Reason: "ready"}}
	f.VIPs(func() []VIP { return now })
	f.Count(Transition{Family: vip.IPv4, To: "withdrawn", Reason: "lb_never_seen"}, 1) // between two scrapes
	wantSeries(t, f.Registry(), frontendVIPState, map[string]float64{
		"family=ipv4 vip=20.0.0.1/32": 0, "family=ipv6 vip=2000::1/128": 2,
	})
	wantSeries(t, f.Registry(), frontendVIPReason,
		map[string]float64{"family=ipv4 reason=no_gateway vip=20.0.0.1/32": 1})
	wantSeries(t, f.Registry(), frontendVIPs, map[string]float64{
		"advertisement=withdrawn family=ipv4 reason=lb_never_seen": 0,
		"advertisement=withdrawn family=ipv4 reason=no_gateway":    1,
		"advertisement=announced family=ipv6 reason=ready":         1,
	})
	now = []VIP{{VIP: a, State: "depreferred", Reason: "drained"}}
	f.Count(Transition{Family: vip.IPv6, To: "withdrawn", Reason: "not_configured", Changed: true, Removed: true}, 1)
	wantSeries(t, f.Registry(), frontendVIPState, map[string]float64{"family=ipv4 vip=20.0.0.1/32": 1})
	wantSeries(t, f.Registry(), frontendVIPReason, map[string]float64{"family=ipv4 reason=drained vip=20.0.0.1/32": 1})
	wantSeries(t, f.Registry(), frontendVIPs, map[string]float64{
		"advertisement=withdrawn family=ipv4 reason=lb_never_seen": 0,
		"advertisement=withdrawn family=ipv4 reason=no_gateway":    0,
		"advertisement=depreferred family=ipv4 reason=drained":     1,
		"advertisement=announced family=ipv6 reason=ready":         0,
	})
	wantSeries(t, f.Registry(), frontendVIPTransitions, map[string]float64{"reason=not_configured to=withdrawn": 1})
}

func TestLBVIPs(t *testing.T) {
	l := NewLB("1")
	now := VIP{VIP: vip.Require("20.0.0.1/32"), State: "ready", Reason: "targets_ready", Ready: 2, Total: 3}
	l.VIPs(func() []VIP { return []VIP{now} })
	wantSeries(t, l.Registry(), lbVIPTransitions, map[string]float64{})
	wantSeries(t, l.Registry(), lbVIPState, map[string]float64{"family=ipv4 vip=20.0.0.1/32": 2})
	wantSeries(t, l.Registry(), lbVIPReason, map[string]float64{})
	wantSeries(t, l.Registry(), lbVIPReadyTargets, map[string]float64{"family=ipv4 vip=20.0.0.1/32": 2})
	wantSeries(t, l.Registry(), lbVIPTargets, map[string]float64{"family=ipv4 vip=20.0.0.1/32": 3})
	now.State, now.Reason = "not ready", "too_few_ready"
	l.Count(Transition{Family: vip.IPv4, To: "not ready", Reason: "too_few_ready", Changed: true}, 7)
	wantSeries(t, l.Registry(), lbVIPTransitions, map[string]float64{"reason=too_few_ready to=not_ready": 7})
	wantSeries(t, l.Registry(), lbVIPState, map[string]float64{"family=ipv4 vip=20.0.0.1/32": 0})
	wantSeries(t, l.Registry(), lbVIPReason,
		map[string]float64{"family=ipv4 reason=too_few_ready vip=20.0.0.1/32": 1})
	wantSeries(t, l.Registry(), lbVIPs, map[string]float64{
		"family=ipv4 reason=targets_ready state=ready": 0, "family=ipv4 reason=too_few_ready state=not_ready": 1,
	})
}

func TestTargetsAtScrape(t *testing.T) {
	l := NewLB("1")
	wantSeries(t, l.Registry(), lbTargets, map[string]float64{})
	now := Targets{
		States: map[string]int{"ready": 2, "not ready": 1}, Rejections: 3,
		Sources: []Source{{"file", true, 3, 1}, {Name: "registry"}},
	}
	l.Targets(func() Targets { return now })
	wantSeries(t, l.Registry(), lbTargets, map[string]float64{"state=ready": 2, "state=not_ready": 1})
	wantSeries(t, l.Registry(), lbSourceLive, map[string]float64{"source=file": 1, "source=registry": 0})
	wantSeries(t, l.Registry(), lbSourceTargets, map[string]float64{"source=file": 3, "source=registry": 0})
	wantSeries(t, l.Registry(), lbSourceProblems, map[string]float64{"source=file": 1, "source=registry": 0})
	wantSeries(t, l.Registry(), lbRegistryRejections, map[string]float64{"": 3})
}

// An alert about a condition that was removed ends.
func TestRemovedConditionHasNoSeries(t *testing.T) {
	f := NewFrontend("1")
	f.Health("Readiness", true, true)
	f.Health("RouteBack/ipv6", false, true)
	f.Health("RouteBack/ipv6", false, false)
	wantSeries(t, f.Registry(), healthServing, map[string]float64{"service=Readiness": 1})
}

func TestIdentityHasOneSeries(t *testing.T) {
	l := NewLB("1")
	l.Identity("", time.Time{})
	wantSeries(t, l.Registry(), identityNotAfter, map[string]float64{})
	l.Identity("spiffe://td/a", time.Unix(100, 500e6))
	wantSeries(t, l.Registry(), identityNotAfter, map[string]float64{"spiffe_id=spiffe://td/a": 100.5})
	l.Identity("spiffe://td/b", time.Unix(200, 0))
	wantSeries(t, l.Registry(), identityNotAfter, map[string]float64{"spiffe_id=spiffe://td/b": 200})
	l.Identity("spiffe://td/b", time.Time{})
	wantSeries(t, l.Registry(), identityNotAfter, map[string]float64{})
}

func TestStreamAndGatewaysAtScrape(t *testing.T) {
	f := NewFrontend("1")
	for _, m := range []Metric{frontendLBLive, frontendLBLeaseAge, frontendBIRDUp, frontendAnnouncerSessions} {
		wantSeries(t, f.Registry(), m, map[string]float64{})
	}
	var now FrontendState
	f.State(func() FrontendState { return now })
	wantSeries(t, f.Registry(), frontendGating, map[string]float64{"": 0})
	wantSeries(t, f.Registry(), frontendLBLive, map[string]float64{})
	now.Stream = &Stream{Reconnects: 2}
	wantSeries(t, f.Registry(), frontendGating, map[string]float64{"": 1})
	wantSeries(t, f.Registry(), frontendLBLive, map[string]float64{"": 0})
	wantSeries(t, f.Registry(), frontendLBLeaseAge, map[string]float64{})
	wantSeries(t, f.Registry(), frontendLBLeaseRemaining, map[string]float64{})
	wantSeries(t, f.Registry(), frontendStreamReconnects, map[string]float64{"": 2})
	now.Stream = &Stream{Live: true, LastMessage: time.Now().Add(-time.Hour), LeaseEnd: time.Now().Add(-time.Minute)}
	if age := series(t, f.Registry(), frontendLBLeaseAge)[""]; age < 3600 {
		t.Errorf("the lease is %v s old", age)
	}
	if left := series(t, f.Registry(), frontendLBLeaseRemaining)[""]; left > -60 {
		t.Errorf("%v s of the lease are left", left)
	}
	now.BIRD = BIRD{Up: true, Gateways: []Gateway{
		{Name: "a", Family: "ipv4", Up: true, Since: time.Now().Add(-time.Minute), Imported: 3, Exported: 4},
		{Name: "b", Family: "ipv4", Held: true, Since: time.Now().Add(-time.Minute)},
	}}
	wantSeries(t, f.Registry(), frontendGatewayUp, map[string]float64{
		"family=ipv4 gateway=a": 1,
		"family=ipv4 gateway=b": 0,
	})
	wantSeries(t, f.Registry(), frontendGatewayHeld, map[string]float64{
		"family=ipv4 gateway=a": 0,
		"family=ipv4 gateway=b": 1,
	})
	wantSeries(t, f.Registry(), frontendGatewayImported,
		map[string]float64{"family=ipv4 gateway=a": 3, "family=ipv4 gateway=b": 0})
	uptime := series(t, f.Registry(), frontendGatewayUptime)
	if uptime["family=ipv4 gateway=a"] < 60 || uptime["family=ipv4 gateway=b"] != 0 {
		t.Errorf("uptimes are %v", uptime)
	}
	now.BIRD = BIRD{}
	wantSeries(t, f.Registry(), frontendGatewayUp, map[string]float64{})
}

func TestCallCountersStartAtZero(t *testing.T) {
	f := fullFrontend()
	f.Serves(served) // a second server has the same services
	wantSeries(t, f.Registry(), callsStarted, map[string]float64{
		"grpc_method=Check grpc_service=grpc.health.v1.Health grpc_type=unary":         0,
		"grpc_method=Get grpc_service=vipgate.x.v1.XService grpc_type=unary":           0,
		"grpc_method=Watch grpc_service=vipgate.x.v1.XService grpc_type=server_stream": 0,
	})
	if n := len(series(t, f.Registry(), CallsHandled)); n != 3*17 {
		t.Errorf("%d series of calls that ended, want each method with each code", n)
	}
	if n := len(served); n != 3 {
		t.Errorf("the server's own list was changed: %d services are left", n)
	}
}

func TestBIRDRefusal(t *testing.T) {
	f := NewFrontend("1")
	now := FrontendState{BIRD: BIRD{Up: true, Configured: true}}
	f.State(func() FrontendState { return now })
	wantSeries(t, f.Registry(), frontendBIRDConfigured, map[string]float64{"": 1})
	now.BIRD = BIRD{Up: true, Refusals: 1}
	wantSeries(t, f.Registry(), frontendBIRDConfigured, map[string]float64{"": 0})
	wantSeries(t, f.Registry(), frontendBIRDRefusals, map[string]float64{"": 1})
}

func numbered(i int) vip.VIP { return vip.Require(fmt.Sprintf("20.0.%d.%d/32", i>>8, i&255)) }

func announcedVIPs(n int) []VIP {
	all := make([]VIP, n)
	for i := range all {
		all[i] = VIP{VIP: numbered(i), State: "announced", Reason: "ready"}
	}
	return all
}

func TestConcurrentScrapes(t *testing.T) {
	const many = 10_000
	f := NewFrontend("1")
	f.VIPs(func() []VIP { return announcedVIPs(many) })
	var wg sync.WaitGroup
	wg.Go(func() {
		for range many {
			f.Count(Transition{Family: vip.IPv4, To: "withdrawn", Reason: "no_gateway", Changed: true}, 1)
		}
	})
	for range 3 {
		counts := 0.0
		for _, n := range series(t, f.Registry(), frontendVIPs) {
			counts += n
		}
		if counts != many {
			t.Errorf("%v VIPs were counted in one scrape, want %d", counts, many)
		}
	}
	wg.Wait()
	wantSeries(t, f.Registry(), frontendVIPs, map[string]float64{
		"advertisement=announced family=ipv4 reason=ready":      many,
		"advertisement=withdrawn family=ipv4 reason=no_gateway": 0,
	})
	wantSeries(t, f.Registry(), frontendVIPTransitions, map[string]float64{"reason=no_gateway to=withdrawn": many})
}

func BenchmarkScrape10000VIPs(b *testing.B) {
	f := NewFrontend("1")
	all := announcedVIPs(10_000)
	f.VIPs(func() []VIP { return slices.Clone(all) })
	b.ReportAllocs()
	for b.Loop() {
		if _, err := f.Registry().Gather(); err != nil {
			b.Fatal(err)
		}
	}
}

// listenTwice returns two listeners, which the server closes.
func listenTwice(t *testing.T) (listeners []net.Listener) {
	t.Helper()
	for range 2 {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		harness.Must(t, err)
		listeners = append(listeners, l)
	}
	return listeners
}

func TestServer(t *testing.T) {
	l := listenTwice(t)
	s := NewServer(l, fullLB().Registry(), slog.New(slog.DiscardHandler))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	<-s.Ready()
	client := &http.Client{Transport: &http.Transport{}, Timeout: 30 * time.Second}
	defer client.CloseIdleConnections()
	get := func(path string) (int, string) {
		r, err := client.Get("http://" + l[1].Addr().String() + path)
		harness.Must(t, err)
		defer r.Body.Close()
		body, err := io.ReadAll(r.Body)
		harness.Must(t, err)
		return r.StatusCode, string(body)
	}
	code, body := get("/metrics")
	for _, want := range []string{
		`vipgate_lb_vip_state{family="ipv4",vip="20.0.0.1/32"} 2`, "go_goroutines ",
		`program="lb"`, `version="1.2.3"`,
	} {
		if code != http.StatusOK || !strings.Contains(body, want) {
			t.Errorf("%d: no %s in\n%s", code, want, body)
		}
	}
	if code, _ := get("/debug/pprof/"); code != http.StatusNotFound {
		t.Errorf("pprof answers %d on the metrics port", code)
	}
	// A client that keeps its connection open must not delay the end.
	idle, err := net.Dial("tcp", l[0].Addr().String())
	harness.Must(t, err)
	defer idle.Close()
	cancel()
	if err := await.Receive(t, "the end of the server", done); err != context.Canceled {
		t.Errorf("got %v", err)
	}
	for _, l := range l {
		if c, err := net.Dial("tcp", l.Addr().String()); err == nil {
			c.Close()
			t.Errorf("%s is still open", l.Addr())
		}
	}
}

func TestScrapesAreBounded(t *testing.T) {
	begun, release := make(chan struct{}), make(chan struct{})
	hang := prometheus.GathererFunc(func() ([]*dto.MetricFamily, error) {
		begun <- struct{}{}
		<-release
		return nil, nil
	})
	l := listenTwice(t)
	s := NewServer(l, hang, slog.New(slog.DiscardHandler))
	harness.Run(t, s.Run)
	client := &http.Client{Transport: &http.Transport{}, Timeout: time.Minute}
	t.Cleanup(client.CloseIdleConnections)
	get := func() (status int) {
		r, err := client.Get("http://" + l[0].Addr().String() + "/metrics")
		if err == nil {
			status = r.StatusCode
			r.Body.Close()
		}
		return status
	}
	var others sync.WaitGroup
	for range maxScrapes {
		others.Go(func() { get() })
		<-begun
	}
	if status := get(); status != http.StatusServiceUnavailable {
		t.Errorf("status %d of a scrape beside %d others", status, maxScrapes)
	}
	close(release)
	others.Wait()
}

func TestHungScrapeIsClosed(t *testing.T) {
	asked, release := make(chan struct{}), make(chan struct{})
	hang := prometheus.GathererFunc(func() ([]*dto.MetricFamily, error) {
		close(asked)
		<-release
		return nil, nil
	})
	l := listenTwice(t)
	s := NewServer(l, hang, slog.New(slog.DiscardHandler))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	scraped := make(chan error, 1)
	client := &http.Client{Transport: &http.Transport{}, Timeout: time.Minute}
	go func() {
		r, err := client.Get("http://" + l[0].Addr().String() + "/metrics")
		if err == nil {
			r.Body.Close()
		}
		scraped <- err
	}()
	<-asked
	cancel()
	if err := <-done; err != context.Canceled {
		t.Errorf("got %v", err)
	}
	if err := <-scraped; err == nil {
		t.Error("a scrape that hung got an answer after the server had ended")
	}
	close(release)
}
