package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	"github.com/vipgate/vipgate/pkg/frontend"
	"github.com/vipgate/vipgate/test/lab"
)

// Each order of an operator is an event and a log line with the user that gave it.
func TestAudit(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.up(f.target1, f.target2)
	f.must(f.pod.WriteTrench(viaAddress(heldTrench())))
	f.must(f.pod.StartLB("--dataplane=nftables"))
	f.must(f.pod.StartFrontend(noDrain, shortSettle))
	f.wantRoutes(every()...)
	f.must(f.pod.WriteTrench(viaAddress(onlyA4())))
	f.waitFrontend(frontend.Held, false)
	f.waitLB(frontend.Held, false)

	for _, program := range []struct {
		name, admin string
		process     *lab.Process
		orders      []string
		want        []string // object, what and detail of the events
	}{
		{"frontend", f.pod.FrontendAdmin(), f.pod.Frontend, []string{
			"drain 20.0.0.1/32 --force", "undrain", "apply-now", "confirm",
		}, []string{
			"an operator drained 20.0.0.1/32", "an operator undrained 20.0.0.1/32",
			"an operator applied the configuration", "held removals confirmed", "log level debug",
		}},
		{"lb", f.pod.LBAdmin(), f.pod.LB, []string{
			"target drain target-2", "target undrain target-2", "hold", "resume", "reconcile", "confirm",
		}, []string{
			"target drained", "target undrained", "data plane hold", "data plane resume", "data plane reconcile",
			"held removals confirmed", "log level debug",
		}},
	} {
		for _, order := range program.orders {
			args := append(strings.Fields(order), "--admin-socket=unix://"+program.admin)
			if out, status := f.run(program.name, args...); status != 0 {
				t.Fatalf("%s %s: %s", program.name, order, out)
			}
		}
		_, err := adminv1.NewLogServiceClient(f.dial(program.admin)).SetLogLevel(t.Context(),
			&adminv1.SetLogLevelRequest{Level: "debug"})
		f.must(err)
		response, err := adminv1.NewEventServiceClient(f.dial(program.admin)).ListEvents(t.Context(),
			&adminv1.ListEventsRequest{})
		f.must(err)
		for _, want := range program.want {
			if !slices.ContainsFunc(response.GetEvents(), func(e *adminv1.Event) bool {
				text := strings.TrimSpace(fmt.Sprintf("%s %s %s", e.GetObject(), e.GetTo(), e.GetDetail()))
				return strings.HasPrefix(text, want) && e.GetBy() == "uid 0"
			}) {
				t.Errorf("%s has no event %q by uid 0: %v", program.name, want, response.GetEvents())
			}
		}
		screen, _ := f.run(program.name, "events", "--admin-socket=unix://"+program.admin)
		if got := strings.Count(screen, "(uid 0)"); got != len(program.want) {
			t.Errorf("%d lines of %s events name the user, want %d:\n%s", got, program.name, len(program.want), screen)
		}
		if got := strings.Count(program.process.Output(), `by="uid 0"`); got != len(program.want) {
			t.Errorf("%d log lines of %s name the user, want %d", got, program.name, len(program.want))
		}
	}
}
