package sidecar

import (
	"log/slog"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/timestamppb"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	targetadminv1 "github.com/vipgate/vipgate/pkg/api/targetadmin/v1"
	"github.com/vipgate/vipgate/pkg/health"
	"github.com/vipgate/vipgate/pkg/metrics"
	shell "github.com/vipgate/vipgate/pkg/process"
	"github.com/vipgate/vipgate/pkg/replypath"
)

func TestHealthOfAddresses(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	o := Options{
		Settings: shell.Settings{Log: log},
		ReplyPath: replypath.Options{
			Pool: []netip.Prefix{netip.MustParsePrefix("20.0.0.0/24"), netip.MustParsePrefix("2000::/64")},
		},
	}
	h := addressHealth{
		health.New(log, func(string, bool, bool) {}), &process{Options: o, path: replypath.New(o.ReplyPath)},
	}
	h.Report(Liveness, "")
	const serving, notServing = healthv1.HealthCheckResponse_SERVING, healthv1.HealthCheckResponse_NOT_SERVING
	for service, want := range map[string]struct {
		status healthv1.HealthCheckResponse_ServingStatus
		code   codes.Code
	}{
		Liveness: {serving, codes.OK},
		"":       {notServing, codes.OK},
		// The path does not run, so that its state is not complete.
		"20.0.0.255":       {notServing, codes.OK},
		"2000::ffff":       {notServing, codes.OK},
		"::ffff:20.0.0.1":  {notServing, codes.OK},
		"2000::1%eth0":     {notServing, codes.OK},
		"20.0.1.0":         {0, codes.NotFound},
		"2000:0:0:1::":     {0, codes.NotFound},
		"20.0.0.1/32":      {0, codes.NotFound},
		"none":             {0, codes.NotFound},
		"vip/20.0.0.1/32 ": {0, codes.InvalidArgument},
	} {
		r, err := h.Check(t.Context(), &healthv1.HealthCheckRequest{Service: service})
		if r.GetStatus() != want.status || status.Code(err) != want.code {
			t.Errorf("%q: %v %v, want %v", service, r, err, want)
		}
	}
}

// Status and metrics have everything that is known of the kernel state.
func TestDescribe(t *testing.T) {
	since := time.Unix(1_700_000_000, 0)
	a, b := netip.MustParseAddr("172.16.0.1"), netip.MustParseAddr("fd00::1")
	state := replypath.Status{
		Complete: true, Since: since, Repairs: 3, Dropped: 4,
		Problems: []replypath.Problem{{Object: "o", Detail: "d", Remedy: "r"}},
		Peers: []replypath.Peer{
			{MAC: "02:00:00:00:00:01", FWMark: 7, Addresses: []netip.Addr{a, b}, Seen: true},
			{MAC: "02:00:00:00:00:02", FWMark: 8, Live: true},
			{MAC: "02:00:00:00:00:03", FWMark: 9, Live: true},
		},
		Full: true, Evicted: 6,
	}
	flows := map[string]int{"02:00:00:00:00:01": 5, "fwmark 0x9": 6}
	got := Describe(Options{
		Settings: shell.Settings{Version: "v1"}, ReplyPath: replypath.Options{
			Interface: "net0", Pool: []netip.Prefix{netip.MustParsePrefix("20.0.0.0/24"), netip.MustParsePrefix("2000::/64")},
		},
	}, state, flows)
	want := &targetadminv1.Status{
		Version: "v1", Interface: "net0", Pool: []string{"20.0.0.0/24", "2000::/64"}, Complete: true,
		Since: timestamppb.New(since), Repairs: 3, Dropped: 4,
		Problems: []*adminv1.Problem{{Object: "o", Detail: "d", Remedy: "r"}},
		Peers: []*targetadminv1.Peer{
			{Mac: "02:00:00:00:00:01", Fwmark: 7, Addresses: []string{"172.16.0.1", "fd00::1"}, Seen: true, Flows: 5},
			{Mac: "02:00:00:00:00:02", Fwmark: 8, Live: true},
			{Mac: "02:00:00:00:00:03", Fwmark: 9, Live: true},
		},
	}
	if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
		t.Error(diff)
	}
	measured := metrics.TargetState{
		Complete: true, Problems: 1, Repairs: 3, Dropped: 4, Live: 2, Gone: 1, Full: true, Evicted: 6, Flows: flows,
	}
	if diff := cmp.Diff(measured, metricsOf(state, flows)); diff != "" {
		t.Error(diff)
	}
}
