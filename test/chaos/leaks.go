package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/vipgate/vipgate/test/lab"
)

// Tolerances of the growth of a process since the first calm point of its life.
const (
	moreFiles      = 3 // connections that are just being replaced
	moreGoroutines = 8
	moreMemory     = 16 << 20 // plus half of the first value: the heap varies
	// leakBound is how long a count may take to come down.
	leakBound = 10 * time.Second
)

// moreChecks returns the additional tolerance for files of the lb: the checks of all addresses,
// two per target, may coincide, and their sockets are kept for a second.
func moreChecks() int { return 2 * targetCount }

// usage counts the resources of a process.
type usage struct {
	Files      int
	Goroutines int // 0 where there are none
	Memory     int // resident, in bytes
}

// leaks compares counts with the counts of earlier calm points.
type leaks struct {
	fixture   *fixture
	processes map[int]usage       // of a process at the first calm point of its life
	most      map[string]usage    // the most seen of a program
	kernel    map[string][]string // the initial state of each namespace
}

func newLeaks(fx *fixture) *leaks {
	return &leaks{fixture: fx, processes: map[int]usage{}, most: map[string]usage{}}
}

// check counts repeatedly until the counts are within their bounds, or leakBound is over.
func (l *leaks) check(ctx context.Context) ([]violation, error) {
	bound, cancel := context.WithTimeout(ctx, leakBound)
	defer cancel()
	var violations []violation
	err := lab.Eventually(bound, 100*time.Millisecond, func() error {
		found, err := l.count(bound)
		if err != nil {
			return err // perhaps only due to the timeout
		}
		if violations = found; len(found) > 0 {
			return errors.New("something leaked")
		}
		return nil
	})
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if len(violations) == 0 && err != nil {
		violations = []violation{{what: fmt.Sprintf("nothing could be counted: %v", err), vip: -1, gateway: -1}}
	}
	return violations, nil
}

// count compares everything once.
func (l *leaks) count(ctx context.Context) ([]violation, error) {
	var violations []violation
	add := func(format string, args ...any) {
		violations = append(violations, violation{fmt.Sprintf(format, args...), -1, -1})
	}
	speaker := l.fixture.speakerPID()
	for _, p := range []struct {
		name, metrics string
		pid           int
	}{{"lb", lab.LBMetrics, l.fixture.lb.pid()}, {"frontend", lab.FrontendMetrics, l.fixture.frontend.pid()}, {
		"speaker",
		"", speaker,
	}} {
		now, err := l.usage(ctx, p.pid, p.metrics)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", p.name, err)
		}
		first, known := l.processes[p.pid]
		if !known {
			l.processes[p.pid] = now
			first = now
		}
		m := l.most[p.name]
		l.most[p.name] = usage{max(m.Files, now.Files), max(m.Goroutines, now.Goroutines), max(m.Memory, now.Memory)}
		more := moreFiles
		if p.name == "lb" {
			more += moreChecks()
		}
		if now.Files > first.Files+more {
			add("%s (pid %d) leaks file descriptors: %d, at first %d", p.name, p.pid, now.Files, first.Files)
		}
		if now.Goroutines > first.Goroutines+moreGoroutines {
			add("%s (pid %d) leaks goroutines: %d, at first %d", p.name, p.pid, now.Goroutines, first.Goroutines)
		}
		if now.Memory > first.Memory*3/2+moreMemory {
			add("%s (pid %d) grows: %d KiB resident, at first %d", p.name, p.pid, now.Memory>>10, first.Memory>>10)
		}
	}
	pids, err := l.fixture.Pod.Processes()
	if err != nil {
		return nil, err
	}
	own := []int{l.fixture.lb.pid(), l.fixture.frontend.pid(), speaker, l.fixture.holder.PID()}
	for _, p := range l.fixture.speakerHelpers() {
		own = append(own, p.PID())
	}
	for _, pid := range pids {
		if !slices.Contains(own, pid) {
			add("process %d is left in the pod: %s", pid, commandLine(pid))
		}
	}
	kernel, err := l.kernelState(ctx)
	if err != nil {
		return nil, err
	}
	if l.kernel == nil {
		// The routes of a session are installed shortly after its VIPs.
		routes := strings.Join(slices.Concat(kernel[routes4], kernel[routes6]), " ")
		for g := range gateways {
			for f := range families {
				if a := clientAddr(g, f).String(); !slices.Contains(strings.Fields(routes), a) {
					add("the pod has no route to %s behind %s", a, gatewayName(g))
				}
			}
		}
		if len(violations) > 0 {
			return violations, nil
		}
		l.kernel = kernel
	}
	for what, lines := range kernel {
		more, less := difference(lines, l.kernel[what]), difference(l.kernel[what], lines)
		if len(more)+len(less) > 0 {
			add("%s: there is %q that was not there at first, and there is no %q", what, more, less)
		}
	}
	return violations, nil
}

// difference returns the lines of a that are not in b.
func difference(a, b []string) []string {
	known := make(map[string]bool, len(b))
	for _, s := range b {
		known[s] = true
	}
	return slices.DeleteFunc(slices.Clone(a), func(s string) bool { return known[s] })
}

// usage reads the usage of a process.
func (l *leaks) usage(ctx context.Context, pid int, metrics string) (usage, error) {
	var u usage
	files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		return u, err
	}
	u.Files = len(files)
	statm, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		return u, err
	}
	if fields := strings.Fields(string(statm)); len(fields) > 1 {
		pages, err := strconv.Atoi(fields[1])
		if err != nil {
			return u, err
		}
		u.Memory = pages * os.Getpagesize()
	}
	if metrics != "" {
		u.Goroutines, err = l.goroutines(ctx, metrics)
	}
	return u, err
}

// goroutines reads go_goroutines from a program's metrics.
func (l *leaks) goroutines(ctx context.Context, addr string) (int, error) {
	client := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, addr string) (conn net.Conn, err error) {
			err = l.fixture.Pod.Do(func() error { conn, err = new(net.Dialer).DialContext(ctx, network, addr); return err })
			return conn, err
		},
	}}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+"/metrics", nil)
	if err != nil {
		return 0, err
	}
	answer, err := client.Do(request)
	if err != nil {
		return 0, err
	}
	defer answer.Body.Close()
	lines := bufio.NewScanner(answer.Body)
	for lines.Scan() {
		if value, ok := strings.CutPrefix(lines.Text(), "go_goroutines "); ok {
			return strconv.Atoi(value)
		}
	}
	return 0, errors.Join(errors.New("the metrics have no go_goroutines"), lines.Err())
}

// volatile matches the parts of a route or a rule that change without a fault.
var volatile = regexp.MustCompile(`\b(expires|mtu|hoplimit|pref|nhid|metric) \S+|\berror -?\d+|\bpackets \d+ bytes \d+`)

// movedTables match the tables for flows of other pods, which depend on the targets of the last
// hours.
var movedTables = regexp.MustCompile(`(?ms)^table ip6? vipgate-lb \{.*?^\}\n`)

// Names of the routes of the pod.
const (
	routes4 = "ip routes of the pod"
	routes6 = "ip -6 routes of the pod"
)

// kernelState returns the kernel state of each namespace: rules, routes, nftables objects,
// queueing disciplines; and the list of namespaces.
func (l *leaks) kernelState(ctx context.Context) (map[string][]string, error) {
	state := map[string][]string{}
	routes, err := l.fixture.Pod.Run(ctx, "ip", "-4", "-o", "route", "show", "table", "all")
	if err != nil {
		return nil, err
	}
	renumber := renumbering(routes)
	for _, ask := range []struct {
		what    string
		ns      *lab.NetNS
		command string
	}{
		{"ip rules of the pod", l.fixture.Pod, "ip -4 rule show"},
		{"ip -6 rules of the pod", l.fixture.Pod, "ip -6 rule show"},
		{routes4, l.fixture.Pod, "ip -4 -o route show table all"},
		{routes6, l.fixture.Pod, "ip -6 -o route show table all"},
		{"nftables of the pod", l.fixture.Pod, "nft list ruleset"},
		{"interfaces of the pod", l.fixture.Pod, "ip -o addr show"},
		{"nftables of gateway A", l.fixture.Gateway, "nft list ruleset"},
		{"nftables of gateway B", l.fixture.Second, "nft list ruleset"},
		{"nftables of the targets", l.fixture.Backend, "nft list ruleset"},
	} {
		words := strings.Fields(ask.command)
		out, err := ask.ns.Run(ctx, words[0], words[1:]...)
		if err != nil {
			return nil, err
		}
		if ask.ns == l.fixture.Pod {
			// Each element of a set on its own line: their order depends on the fwmarks.
			out = renumber(strings.ReplaceAll(movedTables.ReplaceAllString(out, ""), ",", "\n"))
		}
		for line := range strings.Lines(out) {
			// The kernel adds these only for some orders of configuring addresses and forwarding.
			if strings.HasPrefix(line, "anycast ") {
				continue
			}
			// The order of next hops is not significant.
			words := strings.Fields(volatile.ReplaceAllString(line, ""))
			slices.Sort(words)
			state[ask.what] = append(state[ask.what], strings.Join(words, " "))
		}
	}
	names, err := os.ReadDir("/run/netns")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for _, n := range names {
		if strings.HasPrefix(n.Name(), fmt.Sprintf("vg-%d-", os.Getpid())) {
			state["namespaces"] = append(state["namespaces"], n.Name())
		}
	}
	return state, nil
}

// targetRoute is the route of a target's table, which has the number of its fwmark.
var targetRoute = regexp.MustCompile(`default via (\S+) dev \S+ table (\d+)`)

// renumbering returns a function that replaces the fwmarks of targets, as the routes have them, by
// numbers in the order of the targets: a target gets another fwmark when its stream is renamed and
// is not ready.
func renumbering(routes string) func(text string) string {
	const first = 5000 // the lowest fwmark of a target
	numbers := map[uint64]uint64{}
	for _, match := range targetRoute.FindAllStringSubmatch(routes, -1) {
		for t := range targetCount {
			if number, err := strconv.ParseUint(match[2], 10, 32); err == nil && match[1] == targetAddr(t, ipv4).String() {
				numbers[number] = first + uint64(t)
			}
		}
	}
	return func(text string) string {
		return numeral.ReplaceAllStringFunc(text, func(word string) string {
			value, err := strconv.ParseUint(word, 0, 32)
			number, known := numbers[value&0xffffff]
			switch {
			case err != nil || !known:
				return word
			case strings.HasPrefix(word, "0x"):
				return fmt.Sprintf("0x%0*x", len(word)-2, value&^0xffffff|number)
			}
			return strconv.FormatUint(number, 10)
		})
	}
}

var numeral = regexp.MustCompile(`\b(0x[0-9a-f]+|[1-9][0-9]{3,})\b`)

// commandLine returns the command line of a process.
func commandLine(pid int) string {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil {
		return err.Error()
	}
	return strings.ReplaceAll(strings.TrimRight(string(b), "\x00"), "\x00", " ")
}

// dial opens a TCP connection and closes it.
func dial(ctx context.Context, addr netip.AddrPort) error {
	return dialFrom(ctx, netip.Addr{}, addr)
}

// dialFrom is dial from an address.
func dialFrom(ctx context.Context, from netip.Addr, addr netip.AddrPort) error {
	d := net.Dialer{Timeout: time.Second}
	if from.IsValid() {
		d.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(from, 0))
	}
	conn, err := d.DialContext(ctx, "tcp", addr.String())
	if err != nil {
		return err
	}
	return conn.Close()
}
