package fwstate

import (
	"errors"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/sysctl"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/lab"
)

// needTimeouts skips the test on a kernel without timeouts of connections.
func needTimeouts(t *testing.T, f *Conn) {
	t.Helper()
	if f.config.timeouts == 0 {
		lab.Skip(t, "a kernel that assigns timeouts (CONFIG_NF_CONNTRACK_TIMEOUT)")
	}
}

func TestUnavailableTimeouts(t *testing.T) {
	f := openConn(t, lab.NewNetNS(t), Config{})
	f.config.timeouts, f.nft.SendLimit = 0, 0
	if err := f.UseTimeouts(); err == nil || f.config.timeouts != 0 {
		t.Errorf("error %v, timeouts %d", err, f.config.timeouts)
	}
}

// Without the rules of checks the common objects are repaired, and VIPs stay forwarded until then.
func TestMissingChecksAreNoProblem(t *testing.T) {
	for _, change := range []string{
		"nft flush chain inet vipgate-lb checks; nft delete chain inet vipgate-lb checks",
		"nft flush chain inet vipgate-lb checks", "nft 'chain inet vipgate-lb checks { policy drop; }'",
	} {
		ns := lab.NewNetNS(t)
		f := openConn(t, ns, Config{})
		needTimeouts(t, f)
		must(t, writeBase(f, exampleChange()))
		for _, want := range []bool{true, false, true} {
			if base, checks, problem, err := f.ReadBase(); !base || checks != want || problem != "" || err != nil {
				t.Errorf("%s: base %v, checks %v, want %v; problem %q, %v", change, base, checks, want, problem, err)
			}
			if want {
				ns.Shell(t, change)
			} else {
				must(t, f.Write(exampleChange()))
			}
		}
	}
}

// A chain checks of another process stays, and the VIPs are forwarded without timeouts of checks.
func TestForeignChecks(t *testing.T) {
	ns := lab.NewNetNS(t)
	const theirs = "chain inet vipgate-lb checks { counter; }"
	ns.Shell(t, "nft 'table inet vipgate-lb; "+theirs+"'")
	f := openConn(t, ns, Config{})
	needTimeouts(t, f)
	must(t, writeBase(f, exampleChange()))
	if kernel := readAll(t, f); !kernel.Base || kernel.Checks || kernel.Problem != "" || len(kernel.VIPs) != 5 {
		t.Errorf("base %v, checks %v, problem %q, VIPs %v", kernel.Base, kernel.Checks, kernel.Problem, kernel.VIPs)
	}
	if out := ns.Shell(t, "nft list table inet vipgate-lb"); strings.Contains(out, "ct timeout set") ||
		!strings.Contains(out, "chain checks {\n\t\tcounter packets") {
		t.Errorf("the chain of another process became\n%s", out)
	}
}

// Objects of another process do not prevent the removal.
func TestRemovalWithForeignTimeouts(t *testing.T) {
	const rule = "chain inet vipgate-lb theirs { ct timeout set \"checks-tcp\"; }"
	for name, c := range map[string]struct{ change, stays string }{
		"rule that uses them": {rule, "checks-tcp"},
		"counter":             {"add counter inet vipgate-lb checks-udp", "counter checks-udp"},
		"rule and counter":    {rule + "; add counter inet vipgate-lb checks-udp", "counter checks-udp"},
		"none":                {"list ruleset", ""},
	} {
		t.Run(name, func(t *testing.T) {
			ns := lab.NewNetNS(t)
			f := openConn(t, ns, Config{})
			needTimeouts(t, f)
			must(t, writeBase(f, plan.Change{Base: true}))
			ns.Shell(t, "nft '"+c.change+"'")
			must(t, f.RemoveAll())
			out := ns.Shell(t, "nft list ruleset")
			if strings.Contains(out, "vipgate:") || !strings.Contains(out, c.stays) || c.stays == "" && out != "" {
				t.Errorf("left:\n%s", out)
			}
		})
	}
}

// longTimeouts are those of the host, so that no entry ends during the test. A firewall drops
// packets to port 81.
const longTimeouts = `ip link set lo up
	nft add table inet firewall
	nft 'add chain inet firewall input { type filter hook input priority 0; }'
	nft add rule inet firewall input th dport 81 drop
	for timeout in tcp_timeout_syn_sent tcp_timeout_close udp_timeout udp_timeout_stream; do
		echo 250 >/proc/sys/net/netfilter/nf_conntrack_$timeout
	done`

// A check leaves an entry of connection tracking for a few seconds, whether its packets are
// refused, dropped or answered. Other sockets have the timeouts of the host, as checks on a kernel
// without CONFIG_NF_CONNTRACK_TIMEOUT.
func TestChecksLeaveNoLongEntries(t *testing.T) {
	const checks = 50
	for name, c := range map[string]struct {
		mode     Conntrack
		without  bool
		priority int
		many     bool // entries with the timeouts of the host
	}{
		"checks":                          {mode: ConntrackOn, priority: trench.CheckPriority},
		"checks, untracked VIPs":          {mode: ConntrackOff, priority: trench.CheckPriority},
		"other sockets":                   {mode: ConntrackOn, priority: 6, many: true},
		"checks, kernel without timeouts": {mode: ConntrackOn, priority: trench.CheckPriority, without: true, many: true},
	} {
		t.Run(name, func(t *testing.T) {
			ns := lab.NewNetNS(t)
			f := openConn(t, ns, Config{Conntrack: c.mode})
			needTimeouts(t, f)
			if c.without {
				f.config.timeouts = 0
			}
			must(t, writeBase(f, exampleChange()))
			if kernel := readAll(t, f); !kernel.Base || !kernel.Checks {
				t.Error("the common objects are incomplete")
			}
			ns.Shell(t, longTimeouts)
			l, err := ns.Listen("tcp", "[::]:82")
			must(t, err)
			defer l.Close()
			must(t, ns.Do(func() error {
				for range checks {
					if err := oneCheck(c.priority); err != nil {
						return err
					}
				}
				return nil
			}))
			long, least := 0, 9*checks // two sockets may have had the same port
			for entry := range strings.Lines(ns.Shell(t, "cat /proc/net/nf_conntrack")) {
				const timeoutAt = 4
				if left, err := strconv.Atoi(strings.Fields(entry)[timeoutAt]); err != nil || left > 100 {
					long++
				}
			}
			if !c.many && long > 0 || c.many && long < least {
				t.Errorf("%d entries with the timeouts of the host; many: %v", long, c.many)
			}
		})
	}
}

// oneCheck opens sockets with a priority toward ports that refuse (80), drop (81) and, over TCP,
// accept (82), and closes them.
func oneCheck(priority int) error {
	for _, kind := range []int{unix.SOCK_STREAM, unix.SOCK_DGRAM} {
		for port := 80; port <= 82; port++ {
			for domain, to := range map[int]unix.Sockaddr{
				unix.AF_INET:  &unix.SockaddrInet4{Port: port, Addr: [4]byte{127, 0, 0, 1}},
				unix.AF_INET6: &unix.SockaddrInet6{Port: port, Addr: [16]byte{15: 1}},
			} {
				fd, err := unix.Socket(domain, kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
				if err != nil {
					return err
				}
				err = errors.Join(unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PRIORITY, priority),
					unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}))
				if failed := unix.Connect(fd, to); failed != unix.EINPROGRESS && failed != unix.ECONNREFUSED {
					err = errors.Join(err, failed)
				}
				if kind == unix.SOCK_DGRAM {
					_, failed := unix.Write(fd, []byte("x"))
					err = errors.Join(err, failed)
				}
				if err := errors.Join(err, unix.Close(fd)); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// The kernel removes expired entries on request. On its own it does so once a second at most, which
// is too rare for the rounds.
func TestExpiredEntriesAreEvicted(t *testing.T) {
	ns := lab.NewNetNS(t)
	f := openConn(t, ns, Config{})
	must(t, writeBase(f, exampleChange()))
	ns.Shell(t, longTimeouts)
	must(t, ns.Do(func() error { return oneCheck(0) }))
	ns.Shell(t, "for name in /proc/sys/net/netfilter/nf_conntrack_*timeout*; do echo 0 >$name; done")
	const rounds = 2 * int(await.Timeout/time.Second)
	evicted, long, pauses := 0, conntrackCount(t, ns), false
	await.True(t, "eviction of expired entries", func() bool {
		must(t, ns.Do(func() error {
			err := oneCheck(0)
			pauses = f.EvictConntrack(0).After(time.Now()) || pauses
			return err
		}))
		if conntrackCount(t, ns) <= long {
			evicted++
		}
		return evicted == rounds
	})
	if !pauses || f.EvictConntrack(2).After(time.Now()) {
		t.Errorf("pauses after dumps: %v; or after none", pauses)
	}
}

func conntrackCount(t *testing.T, ns *lab.NetNS) int {
	t.Helper()
	var count int
	must(t, ns.Do(func() (err error) {
		count, err = strconv.Atoi(sysctl.Key("net/netfilter/nf_conntrack_count").Read())
		return err
	}))
	return count
}
