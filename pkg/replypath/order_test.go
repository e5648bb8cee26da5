package replypath

import (
	"bufio"
	"context"
	"fmt"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/vipgate/vipgate/test/await"
)

// monitor records the kernel's notifications of rules, routes and neighbor entries in order.
type monitor struct {
	*fixture
	mu       sync.Mutex
	lines    []string
	barriers int
}

func (x *fixture) monitor() *monitor {
	x.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(x.Context()))
	cmd := exec.CommandContext(ctx, "ip", "monitor", "route", "rule", "neigh")
	out, err := cmd.StdoutPipe()
	x.must(err)
	x.must(x.target.Start(cmd))
	m, done := &monitor{fixture: x}, make(chan struct{})
	go func() {
		defer close(done)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			m.mu.Lock()
			m.lines = append(m.lines, strings.TrimSpace(lines.Text()))
			m.mu.Unlock()
		}
	}()
	x.Cleanup(func() {
		cancel()
		<-done
		_ = cmd.Wait()
	})
	m.take()
	return m
}

// take returns the notifications since the last call.
func (m *monitor) take() (lines []string) {
	m.Helper()
	m.barriers++
	barrier := fmt.Sprintf("%d:", 20_000+m.barriers)
	await.True(m, "notification", func() bool {
		rule := fmt.Sprintf("rule %%s priority %d lookup 99", 20_000+m.barriers)
		m.must(m.target.Batch(fmt.Sprintf(rule, "add"), fmt.Sprintf(rule, "del")))
		m.mu.Lock()
		defer m.mu.Unlock()
		lines = m.lines
		return slices.ContainsFunc(lines, func(line string) bool { return strings.HasPrefix(line, "Deleted "+barrier) })
	})
	m.mu.Lock()
	defer m.mu.Unlock()
	m.lines = nil
	return slices.DeleteFunc(lines, func(line string) bool {
		return regexp.MustCompile(`^(Deleted )?2\d{4}:`).MatchString(line)
	})
}

// installed is the order-sensitive part of the kernel state, by prefix, and by family (true is
// IPv6).
type installed struct {
	lookup, unreachable, local map[string]bool
	neighbor                   map[string]bool // by next hop and interface
	route                      map[bool]string // next hop and interface
}

var notifications = map[string]*regexp.Regexp{
	"lookup":      regexp.MustCompile(`^80:\s+from (\S+) lookup 7667 proto 180`),
	"unreachable": regexp.MustCompile(`^81:\s+from (\S+) unreachable proto 180`),
	"local":       regexp.MustCompile(`^local (\S+) dev lo table local proto 180`),
	"route":       regexp.MustCompile(`^default via (\S+ dev \S+) table 7667 proto 180`),
	"neighbor": regexp.MustCompile(
		`^((?:169.254.76.67|fe80::7667:1) dev \S+) (?:lladdr 02:76:67:00:00:01 PERMANENT|FAILED)`),
}

// apply applies a notification, and reports whether it is about the state of this package.
func (s installed) apply(line string) bool {
	object, deleted := strings.CutPrefix(line, "Deleted ")
	for kind, pattern := range notifications {
		match := pattern.FindStringSubmatch(object)
		if match == nil {
			continue
		}
		key, family := match[1], strings.Contains(match[1], ":")
		switch kind {
		case "lookup":
			s.lookup[key] = !deleted
		case "unreachable":
			s.unreachable[key] = !deleted
		case "local":
			s.local[key] = !deleted
		case "route":
			s.route[family] = key
			if deleted {
				s.route[family] = ""
			}
		case "neighbor":
			s.neighbor[key] = !deleted
		}
		return true
	}
	return false
}

// leak returns the reason why packets of the pool could use a wrong route, or be accepted without
// a reply path.
func (s installed) leak() string {
	for prefix, is := range s.local {
		if is && !(s.lookup[prefix] && s.unreachable[prefix] && s.route[strings.Contains(prefix, ":")] != "") {
			return prefix + " is accepted without its reply path"
		}
	}
	for prefix, is := range s.lookup {
		if is && !s.unreachable[prefix] {
			return "replies from " + prefix + " without a route are not dropped"
		}
	}
	for _, hop := range s.route {
		if hop != "" && !s.neighbor[hop] {
			return "the next hop " + hop + " would be resolved"
		}
	}
	return ""
}

// Replies never use a wrong route during installation, pool change, repair and removal. Objects of
// other programs are preserved.
func TestOrderOfChanges(t *testing.T) {
	x := newFixture(t, 0)
	x.wire(x.target, "net1", "int", "02:00:00:00:04:01", "172.16.0.101/24", "fd00:2::101/64")
	x.sh(x.target, `ip rule add from 10.0.0.0/8 lookup 99 priority 80; ip -6 rule add from fd09::/16 lookup 99 priority 80
ip rule add from 20.0.0.0/24 lookup 99 priority 80 protocol static; ip rule add from 9.0.0.0/8 unreachable priority 81
ip route add 10.1.0.0/16 dev net0 table 7667; ip -6 route add fd08::/16 dev net0 table 7667
ip route add local 30.0.0.0/24 dev lo; ip neigh add 172.16.0.77 lladdr 02:00:00:00:00:77 dev net0 nud permanent
nft add table inet other; nft add table netdev other`)
	everything := func() string {
		return x.sh(x.target, `ip rule; ip -6 rule; ip route show table all
ip -6 route show table all | grep -v '^ff00\|fe80'
ip neigh show nud permanent; ip -6 neigh show nud permanent; nft list ruleset`)
	}
	before := everything()
	const foreignObjects = "ip rule; ip -6 rule; ip route show table 7667; ip route show table local"
	foreign := x.sh(x.target, foreignObjects)
	m := x.monitor()
	state := installed{map[string]bool{}, map[string]bool{}, map[string]bool{}, map[string]bool{}, map[bool]string{}}
	check := func(operation string) {
		t.Helper()
		lines := m.take()
		changes := 0
		for _, line := range lines {
			switch {
			case state.apply(line):
				changes++
				if leak := state.leak(); leak != "" {
					t.Errorf("%s: %q: %s in %q", operation, line, leak, lines)
				}
			case strings.HasPrefix(line, "Deleted 169.254.76.67 "): // of returned packets, which have no leak
			case strings.HasPrefix(line, "Deleted ") && !strings.Contains(line, "proto kernel"):
				t.Errorf("%s: %q is not an object of target", operation, line)
			}
		}
		if changes == 0 {
			t.Errorf("%s: no change in %q", operation, lines)
		}
		for line := range strings.Lines(foreign) {
			if now := x.sh(x.target, foreignObjects); !strings.Contains(now, line) {
				t.Errorf("%s: %s is gone in %s", operation, line, now)
			}
		}
	}
	install := func(link string, prefixes ...string) {
		t.Helper()
		o := x.options(prefixes...)
		o.Interface = link
		x.must(x.target.Do(func() error {
			_, err := Install(t.Context(), o)
			return err
		}))
	}
	install("net0", "20.0.0.0/24", "20.1.0.0/24", "2000::/64")
	check("installation")
	install("net0", "20.0.0.0/24", "20.2.0.0/16", "2000::/64", "2002::/64")
	check("another pool")
	x.must(x.target.Do(func() error {
		k, err := dial(x.options("20.0.0.0/24", "20.2.0.0/16", "2000::/64", "2002::/64"))
		x.must(err)
		x.sh(x.target, `ip route del local 20.0.0.0/24 table local; ip -6 route del local 2000::/64 table local
ip rule del priority 80 protocol 180; ip rule del priority 81 protocol 180; ip -6 rule del priority 80 protocol 180`)
		_, problems := k.reconcile(true)
		if len(problems) > 0 {
			t.Error(problems)
		}
		return k.close()
	}))
	install("net1", "20.0.0.0/24", "2000::/64")
	check("repair, another interface and pool")
	x.must(x.target.Do(func() error {
		_, err := Cleanup(t.Context())
		return err
	}))
	check("removal")
	if diff := cmp.Diff(before, everything()); diff != "" {
		t.Errorf("left (+), lost (-):\n%s", diff)
	}
}
