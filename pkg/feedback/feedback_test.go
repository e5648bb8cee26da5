package feedback

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"go.uber.org/goleak"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	probev1 "github.com/vipgate/vipgate/pkg/api/probe/v1"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	probeA = spiffeid.RequireFromString("spiffe://example.org/a")
	probeB = spiffeid.RequireFromString("spiffe://example.org/b")
	source = netip.MustParseAddr("198.51.100.2")
	vip4   = vip.Require("20.0.0.1/32")
)

// rig is a Feedback of two probes, evaluated on demand.
type rig struct {
	*Feedback
	t      *testing.T
	events []string
}

func newRig(t *testing.T) *rig {
	r := &rig{t: t}
	r.Feedback = New(Options{
		Probes: []spiffeid.ID{probeA, probeB}, Quorum: 2, Log: slog.New(slog.DiscardHandler),
		Changed: func(id spiffeid.ID, live bool) { r.events = append(r.events, fmt.Sprint(id.Path(), " ", live)) },
	})
	return r
}

func call(id spiffeid.ID) context.Context {
	return peer.NewContext(context.Background(), &peer.Peer{AuthInfo: identity.AuthInfo{ID: id}})
}

func request(instance string, reachable, dead []uint32) *probev1.ReportRequest {
	return &probev1.ReportRequest{
		Instance: instance, Round: durationpb.New(2 * time.Second),
		Vips: []*probev1.VipVerdict{{Vip: vip4.String(), Sources: []*probev1.SourceVerdict{{
			Address: source.String(), ReachablePorts: reachable, DeadPorts: dead,
		}}}},
	}
}

func (r *rig) report(id spiffeid.ID, reachable, dead []uint32) {
	r.t.Helper()
	_, err := r.Report(call(id), request("x", reachable, dead))
	harness.Must(r.t, err)
}

// sees notes a packet from each port.
func (r *rig) sees(ports ...uint16) {
	for _, port := range ports {
		r.Feedback.sees(flow{netip.AddrPortFrom(source, port), vip4.Prefix().Addr()})
	}
}

func (r *rig) want(after time.Duration, suspected bool) {
	r.t.Helper()
	r.evaluate(time.Now().Add(after))
	if got := r.Suspects().Load()[vip4]; (got != "") != suspected {
		r.t.Fatalf("suspicion %q", got)
	}
}

// A dead path counts only at the pod that gets its packets, and not next to one that is reachable.
func TestOnlyPathsThroughThisPodCount(t *testing.T) {
	for name, c := range map[string]struct {
		seen            []uint16
		reachable, dead []uint32
		suspected       bool
	}{
		"no packet":                  {dead: []uint32{1, 2}},
		"packets of dead paths":      {seen: []uint16{1, 2}, dead: []uint32{1, 2}, suspected: true},
		"a dead path elsewhere":      {seen: []uint16{1}, reachable: []uint32{1}, dead: []uint32{2}},
		"a reachable path elsewhere": {seen: []uint16{2}, reachable: []uint32{1}, dead: []uint32{2}, suspected: true},
		"one of two":                 {seen: []uint16{1, 2}, reachable: []uint32{1}, dead: []uint32{2}},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			r.report(probeA, c.reachable, c.dead)
			r.report(probeB, c.reachable, c.dead)
			r.sees(c.seen...)
			r.sees(99) // no path
			r.report(probeB, c.reachable, c.dead)
			if n := len(r.probes[probeA].seen); n != len(c.reachable)+len(c.dead) {
				t.Errorf("%d flows of %v", n, c)
			}
			r.want(0, c.suspected)
		})
	}
}

func TestPathLeavesPod(t *testing.T) {
	r := newRig(t)
	r.report(probeA, nil, []uint32{1})
	r.report(probeB, nil, []uint32{1})
	r.sees(1)
	r.want(2100*time.Millisecond, false) // the last packet is older than a round
}

func TestLeaseEnds(t *testing.T) {
	r := newRig(t)
	r.report(probeA, nil, []uint32{1})
	r.sees(1)
	r.want(0, false)
	r.report(probeB, nil, []uint32{1})
	r.want(0, false)
	r.sees(1)
	r.want(0, true)
	if got := r.Suspects().Load()[vip4]; got != "2 of 2 probes reach no target through this pod: "+probeA.String()+", "+
		probeB.String() {
		t.Errorf("suspicion %q", got)
	}
	status := r.Status()
	if s := status[0]; !s.Live || s.Paths != 1 || s.Here != 1 || s.Dead != 1 ||
		!slices.Equal(s.DeadVIPs, []vip.VIP{vip4}) {
		t.Errorf("status %+v", s)
	}
	r.want(Lease, false)
	slices.Sort(r.events)
	if want := []string{"/a false", "/a true", "/b false", "/b true"}; !slices.Equal(r.events, want) {
		t.Errorf("events %q", r.events)
	}
	if s := r.Status()[1]; s.Live || s.Paths != 0 || s.Reported.IsZero() {
		t.Errorf("status %+v", s)
	}
}

func TestRefusedReports(t *testing.T) {
	change := func(f func(*probev1.ReportRequest)) *probev1.ReportRequest {
		r := request("x", []uint32{1}, nil)
		f(r)
		return r
	}
	many := make([]uint32, maxPaths)
	most := request("x", many, nil)
	for n := range maxSources - 1 {
		most.Vips[0].Sources = append(most.Vips[0].Sources, &probev1.SourceVerdict{Address: fmt.Sprintf("10.0.0.%d", n)})
	}
	if _, err := newRig(t).Report(call(probeA), most); err != nil {
		t.Errorf("%d sources and %d paths: %v", maxSources, maxPaths, err)
	}
	for name, c := range map[string]struct {
		id      spiffeid.ID
		request *probev1.ReportRequest
		code    codes.Code
	}{
		"another ID": {
			spiffeid.RequireFromString("spiffe://example.org/target"), request("x", nil, nil),
			codes.PermissionDenied,
		},
		"another instance": {probeB, request("y", nil, nil), codes.AlreadyExists},
		"no instance":      {probeA, request("", nil, nil), codes.InvalidArgument},
		"a bad VIP": {
			probeA, change(func(r *probev1.ReportRequest) { r.Vips[0].Vip = "20.0.0.1/8" }),
			codes.InvalidArgument,
		},
		"a bad source": {
			probeA, change(func(r *probev1.ReportRequest) { r.Vips[0].Sources[0].Address = "fe80::1%eth0" }),
			codes.InvalidArgument,
		},
		"many paths": {probeA, request("x", many, []uint32{1}), codes.InvalidArgument},
		"many sources": {probeA, change(func(r *probev1.ReportRequest) {
			for n := range maxSources {
				r.Vips[0].Sources = append(r.Vips[0].Sources, &probev1.SourceVerdict{Address: fmt.Sprintf("10.0.0.%d", n)})
			}
		}), codes.InvalidArgument},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			r.report(probeB, []uint32{1}, nil)
			r.evaluate(time.Now())
			if _, err := r.Report(call(c.id), c.request); grpcstatus.Code(err) != c.code {
				t.Errorf("%v, want %v", err, c.code)
			}
			if r.Refused() != 1 || len(r.probes) != 1 {
				t.Errorf("%d refused, probes %v", r.Refused(), r.probes)
			}
		})
	}
	r := newRig(t)
	if _, err := r.Report(context.Background(), request("x", nil, nil)); grpcstatus.Code(err) != codes.PermissionDenied {
		t.Errorf("without a peer: %v", err)
	}
	// After the lease another process may have the ID.
	r.report(probeA, nil, nil)
	r.evaluate(time.Now())
	r.evaluate(time.Now().Add(Lease))
	r.probes[probeA].reported = time.Now().Add(-Lease)
	_, err := r.Report(call(probeA), request("y", nil, nil))
	harness.Check(t, err)
	// Without sources the next evaluation may be a minute away.
	r.evaluate(time.Now())
	r.probes[probeA].reported = time.Now().Add(-Lease)
	_, err = r.Report(call(probeA), request("z", nil, nil))
	harness.Check(t, err)
}

func TestStatusIsBounded(t *testing.T) {
	r := newRig(t)
	many := &probev1.ReportRequest{Instance: "x", Round: durationpb.New(time.Hour)}
	for n := range 2 * maxShown {
		v := vip.Require(fmt.Sprintf("20.0.0.%d/32", n))
		many.Vips = append(many.Vips, &probev1.VipVerdict{Vip: v.String(), Sources: []*probev1.SourceVerdict{{
			Address: source.String(), DeadPorts: []uint32{1},
		}}})
	}
	_, err := r.Report(call(probeA), many)
	harness.Must(t, err)
	for _, v := range many.GetVips() {
		r.Feedback.sees(flow{netip.AddrPortFrom(source, 1), vip.Require(v.GetVip()).Prefix().Addr()})
	}
	sources := r.evaluate(time.Now())
	if s := r.Status()[0]; len(s.DeadVIPs) != maxShown || s.Dead != 2*maxShown || !strings.HasSuffix(s.ID.Path(), "/a") {
		t.Errorf("status %+v", s)
	}
	if !slices.Equal(sources, []netip.Addr{source}) {
		t.Errorf("sources %v", sources)
	}
}
