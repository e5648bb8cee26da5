package frontend

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	"github.com/vipgate/vipgate/pkg/bird"
	"github.com/vipgate/vipgate/pkg/frontend/orders"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/trench"
	trenchfile "github.com/vipgate/vipgate/pkg/trench/file"
	"github.com/vipgate/vipgate/pkg/vip"
)

// A script with an accidentally empty list of VIPs drains nothing.
func TestDrainOfNothing(t *testing.T) {
	a := &admin{process: &process{}}
	for _, r := range []*frontendv1.DrainRequest{
		{},
		{All: true, Vips: []string{vipA.String()}},
		{All: true, Gateways: []string{"a"}},
		{All: true, EndsAfter: durationpb.New(-1)},
	} {
		if _, err := a.Drain(t.Context(), r); status.Code(err) != codes.InvalidArgument {
			t.Errorf("drain of %v: %v", r, err)
		}
	}
}

// The response to a drain lists the drained VIPs, the VIPs that are still de-preferred, and the
// end of the drain.
func TestDrainAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, _ := testObserver()
		c, _ := newReadyController(o, gate.New(gate.Options{DrainTime: time.Second, NoFlapBackoff: true}))
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- c.Run(ctx) }()
		<-c.ready
		synctest.Wait()
		if !c.tryUpdate() {
			t.Fatal("the controller does not wait")
		}
		config := trenchfile.NewWatcher("/nowhere", trench.Defaults{},
			&trench.Config{Attractor: trench.Attractor{VIPs: []vip.VIP{vipA, vipB}}}, slog.New(slog.DiscardHandler))
		ordered, err := orders.Open("", nil)
		if err != nil {
			t.Fatal(err)
		}
		a := &admin{process: &process{
			Options: Options{Source: config, Gate: gate.Options{DrainTime: time.Second}}, observer: o, controller: c,
			drains: ordered, bird: bird.NewSupervisor(bird.Options{}),
		}}
		a.process.Log = slog.New(slog.DiscardHandler)
		want := func(step string, r *frontendv1.Drains, err error, drained, draining string, until time.Time) {
			t.Helper()
			if err != nil || strings.Join(r.GetDrained(), " ") != drained || strings.Join(r.GetDraining(), " ") != draining ||
				r.GetUntil().AsTime().Sub(until) != 0 && !until.IsZero() || r.GetUntil() != nil && until.IsZero() {
				t.Errorf("%s: %v, %v", step, r, err)
			}
		}
		none := time.Time{}
		r, err := a.Drain(ctx, &frontendv1.DrainRequest{Vips: []string{vipB.String()}})
		want("the first", r, err, vipB.String(), vipB.String(), time.Now().Add(time.Second))
		<-time.After(2 * time.Second)
		r, err = a.Drain(ctx, &frontendv1.DrainRequest{Vips: []string{vipA.String()}})
		want("the second, after the first", r, err, vipA.String()+" "+vipB.String(), vipA.String(),
			time.Now().Add(time.Second))
		<-time.After(2 * time.Second)
		r, err = a.Drain(ctx, &frontendv1.DrainRequest{All: true})
		want("again, after the drain time", r, err, vipA.String()+" "+vipB.String(), "", none)
		u, err := a.Undrain(ctx, &frontendv1.UndrainRequest{Vips: []string{vipB.String()}})
		if err != nil || len(u.GetDrained()) != 1 || u.GetDrained()[0] != vipA.String() {
			t.Errorf("undrained: %v, %v", u, err)
		}
		// The drain with the node ends no operator's drain, and an operator's end of some VIPs does not
		// make it theirs.
		all := vipA.String() + " " + vipB.String()
		r, err = a.Drain(ctx, &frontendv1.DrainRequest{All: true, Node: true, Force: true})
		want("with the node", r, err, all, vipB.String(), time.Now().Add(time.Second))
		r, err = a.Undrain(ctx, &frontendv1.UndrainRequest{All: true, Node: true})
		want("end of the node's drain", r, err, vipA.String(), "", none)
		_, err = a.Drain(ctx, &frontendv1.DrainRequest{All: true})
		want("all again", nil, err, "", "", none)
		_, err = a.Drain(ctx, &frontendv1.DrainRequest{All: true, Node: true, Force: true})
		want("with the node again", nil, err, "", "", none)
		<-time.After(2 * time.Second)
		r, err = a.Undrain(ctx, &frontendv1.UndrainRequest{All: true, Node: true})
		want("end of the node's drain, the operator's stays", r, err, all, "", none)
		_, err = a.Drain(ctx, &frontendv1.DrainRequest{All: true, Node: true, Force: true})
		want("with the node at last", nil, err, "", "", none)
		_, err = a.Undrain(ctx, &frontendv1.UndrainRequest{Vips: []string{vipB.String()}})
		want("a VIP of the operator's", nil, err, "", "", none)
		<-time.After(2 * time.Second)
		r, err = a.Undrain(ctx, &frontendv1.UndrainRequest{All: true, Node: true})
		want("the operator's rest", r, err, vipA.String(), "", none)
		cancel()
		<-ended
	})
}

func TestGatewaySessionEvents(t *testing.T) {
	t0 := time.Unix(100, 0)
	up := func(at time.Time) bird.GatewayState {
		return bird.GatewayState{Name: "g", Up: true, Since: at, State: "Established"}
	}
	down := bird.GatewayState{Name: "g", State: "Active", LastError: "Received: Cease", Since: t0.Add(time.Second)}
	state := func(pid int, g ...bird.GatewayState) bird.State {
		return bird.State{Alive: pid != 0, PID: pid, Version: "2.0.12", Gateways: g}
	}
	for _, tt := range []struct {
		name    string
		was, is bird.State
		want    string
	}{
		{"start", bird.State{}, state(7, down), "BIRD 2.0.12 runs with pid 7, restarts: 0"},
		{"still down", state(7, down), state(7, down), ""},
		{"up", state(7, down), state(7, up(t0)), "g true"},
		{"still up", state(7, up(t0)), state(7, up(t0)), ""},
		{"lost", state(7, up(t0)), state(7, down), "g false Active (Received: Cease)"},
		{
			"lost for a moment", state(7, up(t0)), state(7, up(t0.Add(time.Second))),
			"g false session lost and re-established, g true",
		},
		{"BIRD is gone", state(7, up(t0)), state(0, up(t0)), "BIRD: BIRD does not run, g false BIRD does not run"},
		{"removed", state(7, up(t0)), state(7), ""},
		{
			"refuses", state(7),
			bird.State{Alive: true, PID: 7, ConfigErr: errors.New("line 3")},
			"BIRD keeps an older configuration: line 3",
		},
		{
			"takes it",
			bird.State{Alive: true, PID: 7, ConfigErr: errors.New("line 3")},
			state(7),
			"BIRD loaded the desired configuration",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := ""
			for _, e := range sessionEvents(tt.was, tt.is) {
				if got != "" {
					got += ", "
				}
				switch {
				case e.GetObject() == "":
					got += e.GetDetail()
				case e.GetFrom() == "down" && e.GetTo() == "up":
					got += e.GetObject() + " true"
				case e.GetFrom() == "up" && e.GetTo() == "down":
					got += e.GetObject() + " false " + e.GetDetail()
				}
			}
			if got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}

func TestEventsNameTheCause(t *testing.T) {
	o, _ := testObserver()
	asked := 0
	o.causes.reason = func(r gate.Reason, f vip.Family) string {
		asked++
		return fmt.Sprint(r, " ", f)
	}
	o.decided(decisions{Changes: []gate.Change{
		changeOf(vipA, gate.Announced, gate.Withdrawn, gate.NoGateway),
		changeOf(vipB, gate.Announced, gate.Withdrawn, gate.NoGateway),
	}})
	o.drain()
	all := eventsOf(t, o)
	if len(all) != 2 || all[0].GetDetail() != "no_gateway ipv4" {
		t.Errorf("events %+v", all)
	}
	if families := 1 + int(vipA.Family()^vipB.Family()); asked != families {
		t.Errorf("asked %d times for %d families", asked, families)
	}
}

func TestMergedDecisionsAreRecorded(t *testing.T) {
	o, _ := testObserver()
	down := decisions{Revision: 1, Changes: []gate.Change{changeOf(vipB, gate.Announced, gate.Withdrawn, gate.LBNotReady)}}
	up := decisions{Revision: 2, Changes: []gate.Change{changeOf(vipB, gate.Withdrawn, gate.Announced, gate.Ready)}}
	var revisions []uint64
	o.onDecisions = func(d decisions) { revisions = append(revisions, d.Revision) }
	for range 100_001 {
		o.decided(down)
		o.decided(up)
	}
	o.decided(down)
	o.drain()
	all := eventsOf(t, o)
	// The earlier decisions were merged into one event; the later decisions have their own.
	if len(all) != 4 || !strings.Contains(all[0].GetDetail(), "200000 earlier changes were merged") ||
		all[1].GetFrom() != "announced" {
		t.Errorf("events %+v", all)
	}
	// The reporter confirms a withdrawal once its revision is written. An older revision would confirm
	// it too early.
	if want := []uint64{1, 2, 1}; !slices.Equal(revisions, want) {
		t.Errorf("revisions %v, want %v", revisions, want)
	}
}
