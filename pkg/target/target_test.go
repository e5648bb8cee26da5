package target

import (
	"log/slog"
	"net/netip"
	"strings"
	"testing"

	"go.uber.org/goleak"
	"google.golang.org/grpc/codes"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/vipgate/vipgate/pkg/health"
	"github.com/vipgate/vipgate/pkg/replypath"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestHealthOfAddresses(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	o := Options{
		Pool: []netip.Prefix{netip.MustParsePrefix("20.0.0.0/24"), netip.MustParsePrefix("2000::/64")}, Log: log,
	}
	h := addressHealth{
		health.New(log, func(string, bool) {}), &process{Options: o, path: replypath.New(o.ReplyPath())},
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

func TestIncomplete(t *testing.T) {
	if err := Incomplete(replypath.Status{Complete: true}); err != nil {
		t.Error(err)
	}
	if err := Incomplete(replypath.Status{}); err == nil {
		t.Error("no error without a problem")
	}
	err := Incomplete(replypath.Status{Problems: []replypath.Problem{
		{Object: "interface net1", Detail: "does not exist", Remedy: "attach the network"}, {Object: "a", Detail: "b"},
	}})
	if err == nil || !strings.Contains(err.Error(), "interface net1: does not exist; attach the network\na: b") {
		t.Error(err)
	}
}
