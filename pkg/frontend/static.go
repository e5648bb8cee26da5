package frontend

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/vipgate/vipgate/pkg/bird"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// attraction is the input of the static gateways by family. They send the traffic of all VIPs of a
// family, or of none.
type attraction struct {
	VIPs [len(vip.Families)]gate.Attraction
	Up   [len(vip.Families)]bool
}

// attractor passes the attraction from the gate to BIRD.
type attractor struct {
	all     bool // requires that every VIP of a family is announced, not only one
	current *latest.Value[attraction]
	apply   func(time.Time, [len(vip.Families)]bool) // must not block
	// leaving counts the VIPs that stay configured until they are withdrawn. Owned by the controller.
	leaving [len(vip.Families)]int
}

// leave replaces the VIPs that leave the configuration. The controller calls it.
func (a *attractor) leave(vips []vip.VIP) {
	a.leaving = [len(vip.Families)]int{}
	for _, v := range vips {
		a.leaving[v.Family()]++
	}
}

// follow applies the advertisements that the gate intends. The controller must call it in each
// pass, because BIRD's supervisor holds the BFD sessions down when the calls stop.
func (a *attractor) follow(now time.Time, vips [len(vip.Families)]gate.Attraction) {
	is := attraction{VIPs: vips}
	for f, n := range vips {
		is.Up[f] = attracts(n, a.leaving[f], a.all)
	}
	// The follower shows changes only, although this runs in each pass.
	if is != a.current.Load() {
		a.current.Set(is)
	}
	a.apply(now, is.Up)
}

// attracts reports whether static gateways should send traffic. A de-preferred VIP does not count,
// because BFD has no preference. leaving is the number of configured VIPs that will be withdrawn.
func attracts(n gate.Attraction, leaving int, all bool) bool {
	return n.Announced > 0 && (!all || n.Announced >= n.Configured-leaving)
}

func isStatic(g bird.GatewayState) bool { return g.Protocol == trench.Static }

// senders returns the names of the static gateways of each family that send traffic.
func senders(s bird.State) [len(vip.Families)][]string {
	var names [len(vip.Families)][]string
	for _, g := range s.Gateways {
		if isStatic(g) && g.Up && s.Alive {
			names[g.Family] = append(names[g.Family], g.Name)
		}
	}
	return names
}

// errShared reports that static gateways send the traffic of a withdrawn VIP.
var errShared = errors.New("static gateways send traffic of the family")

// shared returns an error if static gateways send a family's traffic whatever VIP is withdrawn.
func (p *process) shared(family vip.Family) error {
	gateways := slices.DeleteFunc(slices.Clone(p.Source.Value().Load().Config.Attractor.Gateways),
		func(g trench.Gateway) bool { return g.Protocol != trench.Static || !g.Has(family) })
	switch {
	case len(gateways) == 0:
		return nil
	// A static gateway notices a withdrawal only by BFD.
	case slices.ContainsFunc(gateways, func(g trench.Gateway) bool { return g.BFD == nil }):
		return fmt.Errorf("%w: without BFD", errShared)
	case p.attractor.current.Load().Up[family]:
		return fmt.Errorf("%w: other VIPs are announced", errShared)
	}
	return nil
}

// sharedDetail names the static gateways that still send the traffic of a family. The text is a
// suffix for events of VIPs that are not announced.
func (p *process) sharedDetail(family vip.Family) string {
	names := senders(p.bird.State().Load())[family]
	if len(names) == 0 || p.shared(family) == nil {
		return ""
	}
	return "static gateways still send its traffic: " + strings.Join(names, ", ")
}

// detectionTime returns the BFD detection time of the static gateways. A gateway that requires a
// longer receive interval than MinTx needs more time.
func (p *process) detectionTime() time.Duration {
	var longest time.Duration
	for _, g := range p.Source.Value().Load().Config.Attractor.Gateways {
		if g.Protocol == trench.Static && g.BFD != nil {
			longest = max(longest, g.BFD.MinTx*time.Duration(g.BFD.Multiplier))
		}
	}
	return longest
}

// showStatic logs and records when static gateways are held down or released.
func (f *follower) showStatic(is attraction) {
	gateways := f.Source.Value().Load().Config.Attractor.Gateways
	for _, family := range vip.Families {
		// The attraction follows the VIPs even without static gateways: show only a visible effect.
		if f.shownAttraction[family] == is.Up[family] || !slices.ContainsFunc(gateways, func(g trench.Gateway) bool {
			return g.Protocol == trench.Static && g.Has(family)
		}) {
			continue
		}
		f.shownAttraction[family] = is.Up[family]
		what, n := "static gateways held down", is.VIPs[family]
		if is.Up[family] {
			what = "static gateways released"
		}
		f.Log.Info(what, "family", family, "announced", n.Announced, "depreferred", n.Depreferred, "vips", n.Configured)
		f.observer.note(fmt.Sprintf("%s of %s: %d of %d VIPs can be announced", what, family, n.Announced, n.Configured))
	}
}

// warnStatic warns of static gateways that cannot be withdrawn.
func (f *follower) warnStatic(gateways []trench.Gateway) {
	for _, g := range gateways {
		if g.Protocol == trench.Static && g.BFD == nil {
			f.Log.Warn("static gateway without BFD cannot be withdrawn", "gateway", g.Name, "address", g.Address)
			f.observer.note("static gateway " + g.Name + " has no BFD: it cannot be withdrawn")
		}
	}
}
