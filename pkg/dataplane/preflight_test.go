package dataplane

import (
	"strings"
	"testing"

	"github.com/vipgate/vipgate/test/lab"
)

// The first of our rules has packets without a mark jump to the third: rules of
// somebody else in between, such as those of a frontend, would not count any more.
func TestPreflightRefusesPrioritiesWithRulesOfSomebodyElse(t *testing.T) {
	ns := lab.NewNetNS(t)
	run(t, ns, "ip rule add fwmark 0x01000000/0xff000000 lookup 4096 priority 100; ip -6 rule add from all lookup 4097 priority 101")
	for priority, want := range map[int]string{97: "", 98: "", 99: "ipv4", 100: "ipv4 ipv6", 101: "ipv6", 102: ""} {
		var found []string
		must(t, ns.Do(func() error {
			for _, p := range Preflight(Options{Priority: priority}) {
				if family, _, ok := strings.Cut(p.Object, " policy rules of priority"); ok && p.Remedy != "" {
					found = append(found, family)
				}
			}
			return nil
		}))
		if got := strings.Join(found, " "); got != want {
			t.Errorf("priority %d: %q, want %q", priority, got, want)
		}
	}

	// Our own are no hindrance at the next start.
	o := Options{Priority: 200}
	f := openFabric(t, ns, o)
	must(t, f.write(change{base: true}))
	must(t, ns.Do(func() error {
		for _, p := range Preflight(o) {
			if strings.Contains(p.Object, "priority") {
				t.Errorf("%+v", p)
			}
		}
		return nil
	}))
}
