package status

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	lbv1 "github.com/vipgate/vipgate/pkg/api/lb/v1"
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/test/harness"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// `go test ./pkg/status -update` writes the golden files.
var update = flag.Bool("update", false, "write the golden files")

func wantGolden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		harness.Must(t, os.WriteFile(path, []byte(got), 0o644))
	}
	want, err := os.ReadFile(path)
	harness.Must(t, err)
	if d := cmp.Diff(string(want), got); d != "" {
		t.Errorf("%s differs (-want +got):\n%s", path, d)
	}
	for line := range strings.Lines(got) {
		if strings.TrimRight(line, " \n") != strings.TrimSuffix(line, "\n") {
			t.Errorf("trailing blanks in %q", line)
		}
	}
}

// now is the time of every test.
var now = time.Date(2026, 1, 2, 3, 0, 0, 0, time.UTC)

func before(d time.Duration) *timestamppb.Timestamp { return timestamppb.New(now.Add(-d)) }

func lbReady(since time.Duration) *readinessv1.VipReadiness {
	return &readinessv1.VipReadiness{
		State: readinessv1.VipState_VIP_STATE_READY, Reason: readinessv1.VipReason_VIP_REASON_TARGETS_READY,
		ReadyTargets: 2, TotalTargets: 2, Since: before(since),
	}
}

func lbNotReady(since time.Duration) *readinessv1.VipReadiness {
	return &readinessv1.VipReadiness{
		State:  readinessv1.VipState_VIP_STATE_NOT_READY,
		Reason: readinessv1.VipReason_VIP_REASON_TOO_FEW_READY,
		Detail: "target-1: connect to 172.16.1.1:5000: connection refused", TotalTargets: 3, Since: before(since),
	}
}

func goodFrontend() *frontendv1.Status {
	return &frontendv1.Status{
		Version: "v0.1.0", Trench: "trench-a", Attractor: "attractor-a-1", Gating: true,
		SpiffeId: "spiffe://example.org/frontend", IdentityExpires: timestamppb.New(now.Add(43 * time.Minute)),
		Conditions: []*adminv1.Condition{{Name: "Liveness", Serving: true}, {Name: "Readiness", Serving: true}},
		LoadBalancer: &frontendv1.LoadBalancerStatus{
			Freshness: frontendv1.Freshness_FRESHNESS_LIVE, Synced: true,
			LeaseLeft: durationpb.New(812 * time.Millisecond),
			Position:  &readinessv1.Position{InstanceId: "7f3a9c", Revision: 42},
		},
		Bird: &frontendv1.BirdStatus{Version: "2.0.12", Pid: 4242, Since: before(3*time.Hour + 12*time.Minute)},
		Gateways: []*frontendv1.GatewayStatus{{
			Name: "gateway-a-1", Address: "169.254.100.150", Up: true, State: "Established",
			Since: before(3 * time.Hour), Imported: 1, Exported: 1, Expected: 1, Bfd: "Up", NoDelay: true,
		}, {
			Name: "gateway-a-2", Address: "fd00:100::150", Up: true, State: "Established", Since: before(50 * time.Hour),
			Imported: 1, Exported: 1, Expected: 1,
		}},
		Vips: []*frontendv1.VipStatus{{
			Vip: "20.0.0.1/32", Advertisement: readinessv1.Advertisement_ADVERTISEMENT_ANNOUNCED,
			Reason:    readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_READY,
			Since:     before(4*time.Minute + 2*time.Second),
			Readiness: lbReady(time.Hour), Gateways: []string{"gateway-a-1"},
		}, {
			Vip: "2000::1/128", Advertisement: readinessv1.Advertisement_ADVERTISEMENT_ANNOUNCED,
			Reason: readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_READY, Since: before(900 * time.Millisecond),
			Readiness: lbReady(time.Hour), Gateways: []string{"gateway-a-2"},
		}},
	}
}

// badFrontend returns a status with one problem of each kind.
func badFrontend() *frontendv1.Status {
	s := goodFrontend()
	s.Stopping = true
	s.Conditions = []*adminv1.Condition{
		{Name: "Liveness", Serving: true},
		{Name: "Readiness", Detail: "Configuration: refused; Egress/ipv6: gateway-a-2: Active"},
		{
			Name:   "Configuration",
			Detail: "trench.yaml:7: attractor.vips: VIP \"20.0.0.1\" has no prefix length; use 20.0.0.1/32",
		},
		{Name: "Egress", Serving: true},
		{Name: "Egress/ipv6", Detail: "gateway-a-2: Active"},
	}
	s.ConfigurationError = "trench.yaml:7: attractor.vips: VIP \"20.0.0.1\" has no prefix length; use 20.0.0.1/32\n" +
		"trench.yaml:9: attractor.gateways: unknown field \"adress\""
	s.IdentityExpires = before(3 * time.Second)
	s.LoadBalancer = &frontendv1.LoadBalancerStatus{
		Freshness: frontendv1.Freshness_FRESHNESS_STALE, LeaseLeft: durationpb.New(-2500 * time.Millisecond),
		GoingAway: true,
		Position:  &readinessv1.Position{InstanceId: "7f3a9c", Revision: 43}, Error: "stream ended: EOF",
	}
	s.Bird.Restarts, s.Bird.Error = 2, "no answer on the control socket for 2s"
	s.Gateways[0].NoDelay, s.Gateways[0].NoDelayProblem = false, "pidfd_getfd: operation not permitted"
	s.Gateways[1] = &frontendv1.GatewayStatus{
		Name: "gateway-a-2", Address: "fd00:100::150", State: "Active", Since: before(50 * time.Second),
		LastError: "Socket: Connection refused", LastErrorAt: before(2 * time.Second), Bfd: "Down",
		LastNotification: "Received: Hold timer expired", LastNotificationAt: before(50 * time.Second),
	}
	s.Gateways = append(s.Gateways, &frontendv1.GatewayStatus{
		Name: "gateway-a-3", Address: "fe80::3",
		State: "ext-vlan has no IPv6 address",
	})
	s.Vips = append(s.Vips, &frontendv1.VipStatus{
		Vip: "2000::2/128", Advertisement: readinessv1.Advertisement_ADVERTISEMENT_DEPREFERRED,
		Reason: readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_STOPPING, Since: before(time.Second),
		Readiness: lbReady(time.Hour), Gateways: []string{"a", "b", "c", "d", "e"},
	}, &frontendv1.VipStatus{
		Vip: "2000::3/128", Advertisement: readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN,
		Reason: readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_LB_NOT_READY, Since: before(49 * time.Hour),
		Readiness: lbNotReady(49 * time.Hour),
	})
	for i, r := range allReasons() {
		if i == 0 || readinessv1.AdvertisementReason(r) == readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_READY {
			continue
		}
		s.Vips = append(s.Vips, &frontendv1.VipStatus{
			Vip: fmt.Sprintf("20.0.1.%d/32", i), Advertisement: readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN,
			Reason: readinessv1.AdvertisementReason(r), Since: before(time.Minute), Gateways: []string{"gateway-a-1"},
		})
	}
	s.Vips = append(s.Vips, &frontendv1.VipStatus{Vip: "20.0.2.1/32", Reason: 99})
	return s
}

func values(e protoreflect.EnumDescriptor) []int32 {
	var all []int32
	for i := range e.Values().Len() {
		all = append(all, int32(e.Values().Get(i).Number()))
	}
	return all
}

func allReasons() []int32 {
	return values(readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_UNSPECIFIED.Descriptor())
}

func goodLB() *lbv1.Status {
	return &lbv1.Status{
		Version: "v0.1.0", Trench: "trench-a", Synced: true, Lease: durationpb.New(time.Second),
		Position: &readinessv1.Position{InstanceId: "7f3a9c", Revision: 42},
		SpiffeId: "spiffe://example.org/lb", IdentityExpires: timestamppb.New(now.Add(26 * time.Hour)),
		Conditions: []*adminv1.Condition{{Name: "Liveness", Serving: true}, {Name: "Readiness", Serving: true}},
		Vips: []*lbv1.VipStatus{{
			Vip: "20.0.0.1/32", Readiness: lbReady(time.Hour),
			Reported: &readinessv1.VipAdvertisement{
				Advertisement: readinessv1.Advertisement_ADVERTISEMENT_ANNOUNCED,
				Reason:        readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_READY,
			},
		}},
		Streams: []*lbv1.StreamStatus{{
			Name: "stream-a-1", Vips: []string{"20.0.0.1/32"}, MinReady: 1,
			Targets: []*lbv1.TargetStatus{
				{
					Name: "target-1", Address: "172.16.1.1", State: "ready", Since: before(time.Hour),
					LastCheck: before(300 * time.Millisecond), Sources: []string{"file"},
				},
				{
					Name: "target-2", Address: "172.16.1.2", State: "ready", Since: before(time.Hour),
					LastCheck: before(600 * time.Millisecond), Sources: []string{"file", "registry"},
					RegisteredBy: "spiffe://example.org/app",
				},
			},
		}},
		Sources: []*lbv1.SourceStatus{
			{Name: "file", Live: true, Since: before(time.Hour), Targets: 2, OnGone: "hold", Detail: "2 targets"},
			{
				Name: "registry", Live: true, Since: before(time.Hour), Targets: 1, OnGone: "drain",
				Detail: "1 target of 1 caller",
			},
		},
		Watchers: []*lbv1.WatcherStatus{{
			WatchId: "w1", Peer: "spiffe://example.org/frontend", Reader: "attractor-a-1", Since: before(time.Hour),
			SentRevision:    42,
			AppliedRevision: 42, Reporting: true,
			Families: []*readinessv1.FamilyConnectivity{
				{Family: readinessv1.IpFamily_IP_FAMILY_IPV4, Up: true},
				{Family: readinessv1.IpFamily_IP_FAMILY_IPV6},
			},
		}, {
			WatchId: "w2", Peer: "spiffe://example.org/operator", Since: before(2 * time.Second), SentRevision: 42,
		}},
	}
}

// badLB returns a status with one problem of each kind.
func badLB() *lbv1.Status {
	s := goodLB()
	s.GoingAway, s.Synced = true, false
	s.ProbeQuorum, s.Probes = 2, []*lbv1.ProbeStatus{
		{SpiffeId: "spiffe://example.org/probe/a"},
		{
			SpiffeId: "spiffe://example.org/probe/b", Live: true, LastReport: before(time.Second), Paths: 16, PathsHere: 5,
			DeadHere: 3, DeadVips: []string{"20.0.0.1/32"},
		},
	}
	s.Conditions = []*adminv1.Condition{
		{Name: "Readiness", Detail: "Serving: stopping"},
		{Name: "Serving", Detail: "stopping"},
	}
	s.ConfigurationError = "trench.yaml:3: streams: duplicate name \"stream-a-1\""
	s.Vips = append(s.Vips, &lbv1.VipStatus{
		Vip: "20.0.0.2/32", Readiness: lbNotReady(time.Minute),
		Reported: &readinessv1.VipAdvertisement{
			Advertisement: readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN,
			Reason:        readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_LB_NOT_READY, Unconfirmed: true,
		},
	})
	for i, r := range values(readinessv1.VipReason_VIP_REASON_UNSPECIFIED.Descriptor()) {
		reason := readinessv1.VipReason(r)
		state := readinessv1.VipState_VIP_STATE_NOT_READY
		switch reason {
		case readinessv1.VipReason_VIP_REASON_TARGETS_READY, readinessv1.VipReason_VIP_REASON_READINESS_FILE:
			continue
		case readinessv1.VipReason_VIP_REASON_PROBES:
			state = readinessv1.VipState_VIP_STATE_READY
		case readinessv1.VipReason_VIP_REASON_TARGETS_DRAINING:
			state = readinessv1.VipState_VIP_STATE_DRAINING
		}
		s.Vips = append(s.Vips, &lbv1.VipStatus{
			Vip:       fmt.Sprintf("20.0.1.%d/32", i),
			Readiness: &readinessv1.VipReadiness{State: state, Reason: reason, Since: before(time.Second)},
		})
	}
	s.Streams[0].Vips = []string{"20.0.0.1/32", "20.0.0.2/32", "20.0.0.3/32", "20.0.0.4/32"}
	s.Streams[0].Targets = append(s.Streams[0].Targets,
		&lbv1.TargetStatus{
			Name: "target-3", Address: "172.16.1.3", State: "NOT_READY", Since: before(time.Minute),
			LastCheck: before(time.Second), LastError: "connect: connection refused",
		},
		&lbv1.TargetStatus{Name: "target-4", Address: "fd00::4", State: "starting", Since: before(time.Second)},
		&lbv1.TargetStatus{
			Name: "target-5", Address: "fd00::5", State: "overdue", Since: before(time.Second),
			LastCheck: before(9 * time.Second),
		},
		&lbv1.TargetStatus{
			Name: "target-6", Address: "172.16.1.6", State: "draining", Since: before(time.Second),
			DrainEnd: timestamppb.New(now.Add(4 * time.Second)), DrainCause: "deregistered", Checks: "ready",
			Sources: []string{"registry"},
		},
		&lbv1.TargetStatus{
			Name: "target-7", Address: "172.16.1.7", State: "drained", Since: before(time.Hour),
			DrainEnd: before(time.Hour), DrainCause: "operator", Checks: "ready", Sources: []string{"file"},
		},
	)
	s.Sources = append(s.Sources, &lbv1.SourceStatus{
		Name: "directory", Since: before(time.Minute), OnGone: "drop",
		Detail:   "/var/run/meridio: no such file or directory",
		Problems: []string{"lb-ready-unknown: no stream of the trench file has this name"},
	})
	s.Watchers = nil
	return s
}

func TestFrontend(t *testing.T) {
	off := goodFrontend()
	off.Gating = false
	files := goodFrontend()
	files.LoadBalancer.ReadinessDir, files.SpiffeId, files.IdentityExpires = "/var/run/meridio", "", nil
	exported, unknown := goodFrontend(), goodFrontend()
	med := uint32(50)
	exported.Exports = []*frontendv1.Export{{
		Gateway: "gateway-a-1", Vips: []string{"20.0.0.1/32"}, NextHop: "169.254.100.1", AsPath: []uint32{8103, 8103},
		Communities: []string{"64512:100", "64512:1:100"}, Med: &med,
	}, {
		Gateway: "gateway-a-2", Vips: []string{"2000::1/128", "2000::2/128", "2000::3/128", "2000::4/128"},
		NextHop: "fd00:100::1", AsPath: []uint32{8103},
	}}
	unknown.ExportsError = "BIRD did not list them within 2s"
	fresh := &frontendv1.Status{
		Version: "v0.1.0", Trench: "trench-a", Attractor: "attractor-a-1", Gating: true,
		Conditions: []*adminv1.Condition{
			{Name: "Readiness", Detail: "Identity: no SVID yet"},
			{Name: "Identity", Detail: "no SVID yet"},
		},
		Vips: []*frontendv1.VipStatus{{
			Vip: "20.0.0.1/32", Advertisement: readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN,
			Reason: readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_LB_NEVER_SEEN,
		}},
	}
	for _, tt := range []struct {
		name     string
		status   *frontendv1.Status
		complete bool
	}{
		{"frontend-good", goodFrontend(), true},
		{"frontend-bad", badFrontend(), false},
		{"frontend-gating-off", off, true},
		{"frontend-exports", exported, true},
		{"frontend-exports-unknown", unknown, true},
		{"frontend-readiness-files", files, true},
		{"frontend-just-started", fresh, false},
		{"frontend-empty", nil, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, complete := Frontend(tt.status, now)
			if complete != tt.complete {
				t.Errorf("complete is %v, want %v", complete, tt.complete)
			}
			wantGolden(t, tt.name+".golden", got)
		})
	}
}

func TestDepreferredVIPIsAdvertised(t *testing.T) {
	s := goodFrontend()
	s.Vips[0].Advertisement = readinessv1.Advertisement_ADVERTISEMENT_DEPREFERRED
	if _, complete := Frontend(s, now); !complete {
		t.Error("a de-preferred VIP counts as not advertised")
	}
	s.Vips[1].Advertisement = readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN
	if _, complete := Frontend(s, now); complete {
		t.Error("a withdrawn VIP counts as advertised")
	}
}

func TestLB(t *testing.T) {
	for name, s := range map[string]*lbv1.Status{"lb-good": goodLB(), "lb-bad": badLB(), "lb-empty": nil} {
		t.Run(name, func(t *testing.T) { wantGolden(t, name+".golden", LB(s, now)) })
	}
}

func TestEvents(t *testing.T) {
	wantGolden(t, "events.golden", FrontendEventLog().All([]*adminv1.Event{
		{Time: before(time.Minute), Sequence: 1, Detail: "the frontend is starting"},
		{
			Time: before(1500 * time.Millisecond), Sequence: 2, Object: "20.0.0.1/32",
			From:     "withdrawn",
			To:       "announced",
			Reason:   "ready",
			Position: &readinessv1.Position{InstanceId: "7f3a9c", Revision: 3},
		},
		{
			Time: before(0), Sequence: 3, Object: "2000::1/128",
			From:     "announced",
			To:       "withdrawn",
			Reason:   "lb_not_ready",
			Position: &readinessv1.Position{InstanceId: "7f3a9c", Revision: 4},
			Detail:   "target-1: connection refused",
		},
		{
			Time: before(0), Sequence: 4, Object: "gateway-a-1", From: "up", To: "down", Detail: "Active (Received: Cease)",
		},
		{Time: before(0), Sequence: 5, Object: "gateway-a-1", From: "down", To: "up", Detail: "169.254.100.150"},
		{
			Time: before(0), Sequence: 6, Object: "1200 VIPs", VipCount: 1200, FirstVips: []string{"20.0.0.1/32"},
			From:   "announced",
			To:     "withdrawn",
			Reason: "no_gateway",
			Detail: "20.0.0.1/32 and 1199 more: 1200 ipv4 announced to withdrawn, no_gateway",
		},
		{
			Time: before(0), Sequence: 7, Object: "1200 VIPs", VipCount: 1200, FirstVips: []string{"20.0.0.1/32"},
			From:   "withdrawn",
			Detail: "1100 ipv4 withdrawn to announced, ready; 100 ipv4 withdrawn to depreferred, lb_draining",
		},
		{},
	}))
	if got := FrontendEventLog().All(nil); got != "no events\n" {
		t.Errorf("got %q", got)
	}
}

func TestEventLogColumns(t *testing.T) {
	l := FrontendEventLog()
	if got := l.Render(nil); got != "" {
		t.Errorf("no events are %q", got)
	}
	first := l.Render([]*adminv1.Event{{Time: before(0), Sequence: 1, Object: strings.Repeat("g", 40)}})
	second := l.Render([]*adminv1.Event{{Time: before(0), Sequence: 2, Object: "20.0.0.1/32", Detail: "two\nlines"}})
	head, row, _ := strings.Cut(first, "\n")
	if !strings.HasPrefix(head, "TIME") || strings.Contains(second, "TIME") || strings.Count(second, "\n") != 1 {
		t.Errorf("got\n%s%s", first, second)
	}
	if strings.Index(head, "DETAIL") != strings.LastIndex(strings.TrimSpace(row), "-") ||
		strings.Index(second, "two lines") != strings.Index(head, "DETAIL") {
		t.Errorf("the columns moved:\n%s%s", first, second)
	}
}

func TestReasonsAreExplained(t *testing.T) {
	seen := map[string]string{}
	check := func(name string, w Explanation, good bool) {
		if w.Short == "" || w.Meaning == "" || (w.Next == "") != good {
			t.Errorf("%s: %+v", name, w)
		}
		if strings.HasPrefix(w.Short, "reason ") || utf8.RuneCountInString(w.Short) > 27 {
			t.Errorf("%s: %q does not fit into a table", name, w.Short)
		}
		if other, twice := seen[w.Short]; twice {
			t.Errorf("%s and %s have the same words", name, other)
		}
		seen[w.Short] = name
	}
	for _, n := range allReasons() {
		r := readinessv1.AdvertisementReason(n)
		check(r.String(), Explain(r), r == readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_READY)
	}
	for _, n := range values(readinessv1.VipReason_VIP_REASON_UNSPECIFIED.Descriptor()) {
		r := readinessv1.VipReason(n)
		check(r.String(), Explain(r), r == readinessv1.VipReason_VIP_REASON_TARGETS_READY ||
			r == readinessv1.VipReason_VIP_REASON_READINESS_FILE)
	}
}

func TestControlCharactersAreRemoved(t *testing.T) {
	const evil = "refused\x1b[2J\r\nVIP 20.0.0.1/32 yes\u202e\xff"
	f := badFrontend()
	f.Vips[3].Readiness.Detail, f.Gateways[1].LastError, f.Conditions[2].Detail, f.LoadBalancer.Error = evil, evil,
		evil, evil
	f.ConfigurationError, f.Bird.Error = evil, evil
	text, _ := Frontend(f, now)
	l := badLB()
	l.Streams[0].Targets[2].LastError, l.Vips[1].Readiness.Detail = evil, evil
	clean, _ := Frontend(badFrontend(), now)
	for name, got := range map[string]string{"frontend": text, "lb": LB(l, now)} {
		if strings.ContainsAny(got, "\x1b\r\u202e") || !utf8.ValidString(got) {
			t.Errorf("%s prints control characters: %q", name, got)
		}
	}
	if a, b := strings.Count(text, "\n"), strings.Count(clean, "\n"); a != b {
		t.Errorf("%d lines, want %d:\n%s", a, b, text)
	}
}

func TestProblemsOnFirstScreen(t *testing.T) {
	const many = 10_000
	s := goodFrontend()
	s.Vips = nil
	for i := range many {
		v := &frontendv1.VipStatus{
			Vip:           fmt.Sprintf("20.1.%d.%d/32", i/256, i%256),
			Advertisement: readinessv1.Advertisement_ADVERTISEMENT_ANNOUNCED,
			Reason:        readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_READY, Since: before(time.Hour),
		}
		if i == 9_000 {
			v.Advertisement = readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN
			v.Reason = readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_NO_SOURCE_ROUTING
		}
		s.Vips = append(s.Vips, v)
	}
	text, complete := Frontend(s, now)
	if complete {
		t.Error("a VIP is withdrawn, and all is said to be well")
	}
	lines := strings.SplitN(text, "\n", 25)
	screen := strings.Join(lines[:24], "\n")
	harness.WantText(t, screen,
		"9999 of 10000 VIPs advertised", "no source routing. ", "next: SourceRouting",
		"20.1.35.40/32   NO ",
	)
	if s.Vips[0].GetVip() != "20.1.0.0/32" {
		t.Error("the status was reordered in place")
	}
	if n := strings.Count(text, "20.1."); n != many {
		t.Errorf("%d VIPs are shown", n)
	}
}

func TestSpans(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0: "0ms", 999 * time.Millisecond: "999ms", time.Second: "1s", 59 * time.Second: "59s", 61 * time.Second: "1m1s",
		time.Hour: "1h0m", 23*time.Hour + 59*time.Minute: "23h59m", 24 * time.Hour: "1d0h",
		100 * 24 * time.Hour: "100d0h",
	} {
		if got := span(d); got != want {
			t.Errorf("span(%v) = %q, want %q", d, got, want)
		}
	}
	if got := ago(timestamppb.New(now.Add(time.Hour)), now); got != "0ms" {
		t.Errorf("what is to come is %q", got)
	}
}

func TestJSONIsWholeAndStable(t *testing.T) {
	line, err := JSON(goodFrontend(), false)
	harness.Must(t, err)
	if strings.Count(line, "\n") != 1 || strings.Contains(line, `": `) {
		t.Errorf("not one compact line: %s", line)
	}
	indented, err := JSON(goodFrontend(), true)
	harness.Must(t, err)
	var x, y map[string]any
	harness.Must(t, json.Unmarshal([]byte(line), &x))
	harness.Must(t, json.Unmarshal([]byte(indented), &y))
	if d := cmp.Diff(x, y); d != "" {
		t.Error(d)
	}
	if x["stopping"] != false || x["trench"] != "trench-a" {
		t.Errorf("fields are missing: %s", line)
	}
	wantGolden(t, "frontend-good.json.golden", indented)
}

func TestFrontendWithNSP(t *testing.T) {
	s := goodFrontend()
	s.ConfigurationSource = "NSP nsp-service-trench-a:7778"
	text, _ := Frontend(s, now)
	if want := "configuration  NSP nsp-service-trench-a:7778, current\n"; !strings.Contains(text, want) {
		t.Errorf("the status\n%s\nlacks %q", text, want)
	}
	s.ConfigurationError = "VIP vip-a: VIP \"20.0.0.1\" has no prefix length; use 20.0.0.1/32"
	s.Conditions = append(s.Conditions, &adminv1.Condition{Name: "NSPCli", Detail: "not refreshed since noon"})
	text, _ = Frontend(s, now)
	harness.WantText(t, text,
		"NSP nsp-service-trench-a:7778, not refreshed since noon\n",
		"The configuration of the NSP nsp-service-trench-a:7778 is not in force, or not all of it:\n  VIP vip-a: ",
	)
}

// An error that a condition reports is printed once, including the remedy at its end.
func TestErrorOfLoadBalancer(t *testing.T) {
	text := "the load balancer on /var/lib/meridio/lb.sock closed the connection right after the TLS handshake: " +
		strings.Repeat("it denied the client's SPIFFE ID; ", 10) + "compare --frontend-id of lb with the frontend's ID"
	s := &frontendv1.Status{
		Gating:       true,
		Conditions:   []*adminv1.Condition{{Name: "Readiness"}, {Name: "Stream", Detail: text}},
		LoadBalancer: &frontendv1.LoadBalancerStatus{Error: text},
	}
	if out, _ := Frontend(s, time.Now()); strings.Count(out, text) != 1 {
		t.Errorf("%d times in\n%s", strings.Count(out, text), out)
	}
	s.Conditions[1].Serving = true // an error while the readiness is still valid
	if out, _ := Frontend(s, time.Now()); strings.Count(out, text) != 1 {
		t.Errorf("%d times in\n%s", strings.Count(out, text), out)
	}
	s.Conditions[1] = &adminv1.Condition{Name: "Stream", Detail: "another"}
	if out, _ := Frontend(s, time.Now()); !strings.Contains(out, "last error: "+text) {
		t.Errorf("no error in\n%s", out)
	}
}

// The last error of a gateway has its age.
func TestErrorOfGateway(t *testing.T) {
	now := time.Unix(1000, 0)
	at := timestamppb.New(now.Add(-12 * time.Second))
	for _, g := range []*frontendv1.GatewayStatus{
		{Name: "a", State: "Active (Received: Cease)", LastError: "Received: Cease", LastErrorAt: at},
		{Name: "a", State: "unknown", LastError: "Received: Cease", LastErrorAt: at, LastNotification: "Received: Cease"},
	} {
		out, _ := Frontend(&frontendv1.Status{Gateways: []*frontendv1.GatewayStatus{g}}, now)
		if strings.Count(out, "NOTIFICATION received: Cease") != 1 || !strings.Contains(out, ", 12s ago") {
			t.Errorf("state in\n%s", out)
		}
	}
}

// A VIP that left the trench file is shown until it is withdrawn, and is none of the VIPs that have
// to be advertised.
func TestLeavingVIPIsShown(t *testing.T) {
	s := goodFrontend()
	leaving := &frontendv1.VipStatus{
		Vip: "20.0.0.9/32", Advertisement: readinessv1.Advertisement_ADVERTISEMENT_DEPREFERRED, Kept: "leaving",
		Reason: readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_DRAINED, Since: before(time.Second),
	}
	s.Leaving = []*frontendv1.VipStatus{leaving}
	for advertisement, want := range map[readinessv1.Advertisement]string{
		readinessv1.Advertisement_ADVERTISEMENT_DEPREFERRED: "de-preferred",
		readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN:   "NO",
	} {
		leaving.Advertisement = advertisement
		text, complete := Frontend(s, now)
		row := regexp.MustCompile(`(?m)^20\.0\.0\.9/32 +` + want + ` +1s +left the trench file `)
		if !complete || !row.MatchString(text) || !strings.Contains(text, "\n2 of 2 VIPs advertised\n") {
			t.Errorf("complete %t:\n%s", complete, text)
		}
	}
}
