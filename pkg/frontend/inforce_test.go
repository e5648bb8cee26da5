package frontend

import (
	"fmt"
	"log/slog"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/vipgate/vipgate/pkg/announce"
	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	"github.com/vipgate/vipgate/pkg/frontend/directory"
	"github.com/vipgate/vipgate/pkg/frontend/orders"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/metrics"
	"github.com/vipgate/vipgate/pkg/policy"
	"github.com/vipgate/vipgate/pkg/readinessfile"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/trench/file"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
)

// All consumers of the VIPs in force agree about a VIP while it is in the file, held, without its
// last stream, leaving and gone, and when it returns from each.
func TestConsumersOfVIPsInForce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFollower(t)
		var err error
		f.drains, err = orders.Open("", f.Log)
		harness.Must(t, err)
		f.announcer = f.controller.announcer
		f.Source = file.NewWatcher("trench.yaml", trench.DefaultDefaults(), nil, f.Log)
		source := directory.New(readinessfile.NewReader(readinessfile.Options{
			Path: t.TempDir(), Log: slog.New(slog.DiscardHandler),
		}), f.InForce, f.Gate.DrainTime, "instance")

		configured := func(med int64, held []vip.VIP, served bool, vips ...vip.VIP) trench.Loaded {
			config := &trench.Config{Attractor: trench.Attractor{VIPs: vips}}
			if slices.Contains(vips, vipA) && med > 0 {
				config.Attractor.Policies = []trench.Policy{{VIPs: []vip.VIP{vipA}, Ready: trench.Attributes{MED: med}}}
			}
			if served {
				config.Streams = []trench.Stream{{Name: "a", VIPs: vips}}
			}
			return trench.Loaded{Config: config, Held: trench.Held{VIPs: held}}
		}
		listed := configured(7, nil, true, vipA, vipB)
		held := configured(7, []vip.VIP{vipA}, true, vipA, vipB)
		edited := configured(8, nil, true, vipA, vipB)
		ended := configured(0, nil, false, vipA, vipB)
		left := configured(0, nil, true, vipB)
		revision := uint64(0)
		// A consumer that does not have the VIP says nothing.
		const announced, drains = "ANNOUNCED in vips", "DEPREFERRED in leaving"
		for _, step := range []struct {
			name, kept, status, directory, advertised string
			loaded                                    *trench.Loaded // nil: the drain of leaving VIPs ends
			med                                       int64
		}{
			{"listed", "", announced, "ready", "announced", &listed, 7},
			{"held", "held", announced, "ready", "announced", &held, 7},
			{"held, and back", "", announced, "ready", "announced", &listed, 7},
			{"ended", "ended", announced, "draining", "announced", &ended, 7},
			{"ended, and back", "", announced, "ready", "announced", &edited, 8},
			{"leaving", "leaving", drains, "ready", "depreferred", &left, 8},
			{"leaving, and back", "", announced, "ready", "announced", &listed, 7},
			{"held again", "held", announced, "ready", "announced", &held, 7},
			{"confirmed", "leaving", drains, "ready", "depreferred", &left, 7},
			{"gone", "", "", "", "", nil, 0},
			{"back", "", announced, "ready", "announced", &listed, 7},
		} {
			if step.loaded != nil {
				harness.Must(t, f.configure(t.Context(), *step.loaded))
			} else {
				harness.Must(t, f.endLeaving(t.Context()))
			}
			f.observer.drain()
			inForce := f.InForce.Load()
			if kept := inForce.Kept[vipA].String(); kept != step.kept {
				t.Errorf("%s: kept as %q", step.name, kept)
			}

			status, is := f.status(), ""
			lists := map[string][]*frontendv1.VipStatus{"vips": status.GetVips(), "leaving": status.GetLeaving()}
			for where, list := range lists {
				for _, v := range list {
					if v.GetVip() == vipA.String() {
						is += fmt.Sprintf("%v in %s", v.GetAdvertisement(), where)[len("ADVERTISEMENT_"):]
						if v.GetKept() != step.kept {
							t.Errorf("%s: status has %q", step.name, v.GetKept())
						}
					}
				}
			}
			if is != step.status {
				t.Errorf("%s: status has %q, want %q", step.name, is, step.status)
			}

			has := func(one metrics.VIP) bool { return one.VIP == vipA }
			is = ""
			if all := f.observer.metrics(); slices.ContainsFunc(all, has) {
				is = all[slices.IndexFunc(all, has)].State
			}
			if is != step.advertised {
				t.Errorf("%s: metrics have %q, want %q", step.name, is, step.advertised)
			}
			if _, known := f.observer.state.serves(vipA); known != (step.advertised != "") {
				t.Errorf("%s: the health service knows the VIP: %t", step.name, known)
			}
			decision := gate.Decision{Advertisement: gate.Announced, Reason: gate.Ready}
			route := f.controller.policies.Route(vipA, decision)
			if want := policyRoute(t, step.med, decision); route != want {
				t.Errorf("%s: route %+v, want MED %d", step.name, route, step.med)
			}
			// The last flows of a VIP need source routing after it is gone.
			if routed, _ := f.routed(time.Now()); !routed.Has(vipA) {
				t.Errorf("%s: not routed", step.name)
			}

			revision++
			listing := readinessfile.Listing{Scanned: true, At: time.Now(), Revision: revision}
			if step.name != "ended" { // a file of a stream that the trench file lacks does not count
				listing.Files = map[string]struct{}{"lb-ready-a": {}}
			}
			source.Publish(time.Now(), listing, inForce)
			is = ""
			for _, one := range source.Take().Changed {
				if one.VIP == vipA {
					is = one.State.String()
				}
			}
			if is != step.directory {
				t.Errorf("%s: the directory says %q, want %q", step.name, is, step.directory)
			}
		}
	})
}

// policyRoute returns the route of a VIP with a MED; without a policy if it is 0.
func policyRoute(t *testing.T, med int64, decision gate.Decision) announce.Route {
	t.Helper()
	if med == 0 {
		return (policy.Policies{}).Route(vipA, decision)
	}
	policies, err := policy.New([]trench.Policy{{Ready: trench.Attributes{MED: med}}}, policy.Carried)
	harness.Must(t, err)
	return policies.Route(vipA, decision)
}
