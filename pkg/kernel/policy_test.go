package kernel

import (
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/rtnetlink"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/lab"
)

// additions records the rules and routes of this package in the order in which they are added.
type additions struct {
	mu    sync.Mutex
	order []string
}

func (a *additions) take() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	order := a.order
	a.order = nil
	return order
}

func (a *additions) handle(m netlink.Message) {
	added := ""
	switch m.Header.Type {
	case unix.RTM_NEWROUTE:
		if r, err := rtnetlink.ParseRoute(m.Data); err == nil && r.Protocol == protocol && r.Type == unix.RTN_BLACKHOLE {
			added = fmt.Sprintf("blackhole %d", r.Table)
		}
	case unix.RTM_NEWRULE:
		if r, err := rtnetlink.ParseRule(m.Data); err == nil && r.Protocol == protocol && r.Mark != 0 {
			added = fmt.Sprintf("rule %d", r.Priority)
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if added != "" {
		a.order = append(a.order, added)
	}
}

// Packets from VIPs are dropped while rules are missing: the rules that drop packets without a
// gateway are installed before the rule for the gateways' table.
func TestPolicyIsInstalledInOrder(t *testing.T) {
	ns := lab.NewNetNS(t)
	a, l := &additions{}, rtnetlink.NewListener()
	must(t, ns.Do(func() error {
		return l.Listen("rules and routes", rtnetlink.Subscription{
			Protocol: unix.NETLINK_ROUTE, Handle: a.handle, Overrun: func() { t.Error("notifications were lost") },
			Groups: []uint32{
				unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE,
			},
		})
	}))
	defer func() { must(t, l.Close()) }()
	p := policy{testOptions(t).withDefaults()}
	for _, f := range vip.Families {
		want := [][]string{
			vip.IPv4: {"blackhole 4097", "rule 101", "rule 100"},
			vip.IPv6: {"blackhole 4097", "rule 102", "rule 101", "rule 100"},
		}[f]
		for _, name := range []string{"installed", "restored"} {
			must(t, ns.Do(func() error {
				changed, err := p.ensure(f)
				if err == nil && !changed {
					t.Error("nothing was changed")
				}
				return err
			}))
			var got []string
			await.True(t, fmt.Sprintf("%s: %d additions are notified", f, len(want)), func() bool {
				got = append(got, a.take()...)
				return len(got) >= len(want)
			})
			if !slices.Equal(got, want) {
				t.Errorf("%s %s in the order %q, want %q", f, name, got, want)
			}
			must(t, ns.Do(func() error {
				_, err := p.remove(f, true)
				return err
			}))
		}
	}
}

// A list may lack an installed rule while another process changes rules. It is not drift.
func TestOnlyMissingRulesAreAdded(t *testing.T) {
	ns := lab.NewNetNS(t)
	p := policy{testOptions(t).withDefaults()}
	for _, f := range vip.Families {
		rules := p.rules(f)
		for _, gone := range [][]rtnetlink.Rule{nil, rules[1:2], rules, nil} {
			must(t, ns.Do(func() error {
				conn, err := rtnetlink.Dial()
				if err != nil {
					return err
				}
				defer conn.Close()
				if _, err := p.ensure(f); err != nil {
					return err
				}
				for _, rule := range gone {
					must(t, conn.Apply(rule.Delete()))
				}
				added, err := p.add(conn, rules)
				if added != (len(gone) > 0) {
					t.Errorf("%s without %v: added %t", f, gone, added)
				}
				if left, missErr := p.missingRules(conn, f); len(left) > 0 || missErr != nil {
					t.Errorf("%s lacks %v, %v", f, left, missErr)
				}
				return err
			}))
		}
	}
}
