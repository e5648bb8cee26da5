package dataplane

import (
	"strings"
	"testing"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Objects written with different options also belong to the plane: they are rebuilt, and no old
// object remains.
func TestStartWithOtherOptionsRebuilds(t *testing.T) {
	for name, change := range map[string]func(*Options){
		"conntrack off":   func(o *Options) { o.Conntrack = ConntrackOff },
		"conntrack loose": func(o *Options) { o.Conntrack = ConntrackLoose },
		"mask":            func(o *Options) { o.Mask = 0xffff },
		"priority":        func(o *Options) { o.Priority = 80 },
		"near priority":   func(o *Options) { o.Priority = 91 },
	} {
		t.Run(name, func(t *testing.T) {
			x := newSite(t)
			desired := siteStream("a", bothVIPs, siteTarget(1, plan.Serving, plan.Serving),
				siteTarget(2, plan.Serving, plan.Serving))
			whole := func(s plan.State) bool {
				return serves(s, "a", vip.IPv4, "t1", "t2") && serves(s, "a", vip.IPv6, "t1", "t2") && len(s.VIPs) == 2 &&
					len(s.Drift)+len(s.Problems) == 0
			}
			fresh := newSite(t)
			fresh.remember()
			x.remember()
			p := fresh.start(change)
			p.configure(desired)
			p.wait("a fresh one", whole)
			want := sortedLines(fresh.snapshot())

			p = x.start()
			p.configure(desired)
			p.stop()
			before := sortedLines(x.snapshot())
			p = x.start(change)
			p.configure(desired)
			p.wait("the same with other options", whole)
			x.eventually("nothing of before to be left", func() bool { return sortedLines(x.snapshot()) == want })
			p.stop()
			p = x.start()
			p.configure(desired)
			p.wait("the first options again", whole)
			if !strings.HasPrefix(name, "conntrack") { // sets of untracked addresses remain
				x.eventually("all to be as at first", func() bool { return sortedLines(x.snapshot()) == before })
			}
			p.stop()
			x.must(x.ns.Do(func() error {
				o := x.options() // any valid options
				o.Priority = 50
				_, err := Cleanup(t.Context(), o)
				return err
			}))
			if got := x.snapshot(); strings.Contains(got, "179") || strings.Contains(got, plan.TableName) {
				t.Errorf("left:\n%s", got)
			}
		})
	}
}
