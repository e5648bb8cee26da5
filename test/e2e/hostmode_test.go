package e2e

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

var hostStreams = `streams:
  - name: self
    vips: [20.0.0.1/32, "2000::1/128"]
    check: {tcp: {port: 5000}, ` + lab.CheckTimers + `}
    targets:
      - {name: self, ips: [127.0.0.1, "::1"]}
`

// hostMode is a host whose own server has the VIPs.
type hostMode struct {
	*fixture
	server  []*lab.Target // one for each family
	monitor *lab.Process  // prints the changes of addresses
}

func newHostMode(t *testing.T) *hostMode {
	t.Helper()
	h := &hostMode{fixture: newFixture(t)}
	h.must(h.pod.WriteTrench(attractor() + hostStreams))
	for _, address := range []string{"127.0.0.1:5000", "[::1]:5000"} {
		h.server = append(h.server, lab.NewTarget(h.Pod, netip.MustParseAddrPort(address)))
	}
	t.Cleanup(func() {
		for _, server := range h.server {
			harness.Check(t, server.Down())
		}
	})
	h.up(h.server)
	h.monitor = h.start("monitor", "ip", "-o", "-ts", "monitor", "address", "dev", "lo")
	return h
}

// start starts a process on the host.
func (h *hostMode) start(name string, command ...string) *lab.Process {
	h.t.Helper()
	p, err := h.Start(h.Pod, name, command...)
	h.must(err)
	return p
}

func (h *hostMode) startLB(flags ...string) {
	h.t.Helper()
	h.pod.LB = h.start("lb", append([]string{
		binaries + "/lb", "run", "--trench-file=" + h.pod.TrenchFile(), "--socket=unix://" + h.pod.Socket(),
		"--admin-socket=unix://" + h.pod.LBAdmin(), "--state-dir=" + h.pod.StateDir(), "--log-format=text",
		"--identity=peer-credentials", "--vip-interface=lo",
	}, slices.Concat(lab.LBTimers, flags)...)...)
}

func (h *hostMode) startFrontend(flags ...string) {
	h.t.Helper()
	h.pod.Frontend = h.start("frontend", append([]string{
		binaries + "/frontend", "run", "--trench-file=" + h.pod.TrenchFile(), "--lb-socket=unix://" + h.pod.Socket(),
		"--admin-socket=unix://" + h.pod.FrontendAdmin(), "--external-interface=" + lab.External,
		"--bird-dir=" + h.pod.BirdDir(), "--bird-socket=" + h.pod.BirdSocket(), "--log-format=text",
		"--identity=peer-credentials", noDrain,
	}, slices.Concat(lab.FrontendTimers, flags)...)...)
}

// change is a change of an address.
type change struct {
	at      time.Time
	deleted bool
}

// changes returns the changes of an address so far.
func (h *hostMode) changes(address string) (list []change) {
	h.t.Helper()
	for line := range strings.Lines(h.monitor.Output()) {
		stamp, rest, _ := strings.Cut(strings.TrimPrefix(line, "["), "] ")
		at, err := time.ParseInLocation("2006-01-02T15:04:05.000000", stamp, time.Local)
		if err == nil && strings.Contains(rest, " "+address+" ") {
			list = append(list, change{at, strings.HasPrefix(rest, "Deleted")})
		}
	}
	return list
}

// waitChange waits until an address has n changes, and returns the last one.
func (h *hostMode) waitChange(address string, n int, deleted bool) time.Time {
	h.t.Helper()
	var last change
	h.waitFor(func() error {
		list := h.changes(address)
		if len(list) != n || list[n-1].deleted != deleted {
			return fmt.Errorf("address %s: changes %v, want %d", address, list, n)
		}
		last = list[n-1]
		return nil
	})
	return last.at
}

// wantWithdrawnFirst fails unless both VIPs were withdrawn at the gateway, and then lost their
// addresses by their n-th change.
func (h *hostMode) wantWithdrawnFirst(mark, n int) {
	h.t.Helper()
	for _, v := range []string{vipA4, vipA6} {
		withdrawn := h.waitUpdate(mark, v, "withdrawn").At
		if removed := h.waitChange(v, n, true); removed.Before(withdrawn) {
			h.t.Errorf("%s left the kernel %v before its withdrawal", v, withdrawn.Sub(removed))
		}
	}
}

// A VIP of this host has an address before it is announced, until it is withdrawn.
func TestHostModeAddresses(t *testing.T) {
	t.Parallel()
	h := newHostMode(t)
	mark := h.mark()
	h.startLB()
	h.startFrontend()
	for _, v := range []string{vipA4, vipA6} {
		h.waitUpdate(mark, v, "announced")
		// The time stamps of the monitor may be later than the addresses.
		if out := h.podShell("ip -o address show dev lo"); !strings.Contains(out, " "+v+" ") {
			t.Errorf("%s was announced before it had an address: %s", v, out)
		}
		h.waitChange(v, 1, false)
	}
	h.wantRoutes(vipA4, vipA6)
	mark = h.mark()
	h.down(h.server)
	h.wantWithdrawnFirst(mark, 2)
	h.up(h.server)
	h.wantRoutes(vipA4, vipA6)

	// The next lb adopts the addresses of one that was killed.
	mark = h.mark()
	h.must(h.pod.LB.Kill())
	h.waitUpdate(mark, vipA4, "withdrawn")
	h.startLB()
	h.wantRoutes(vipA4, vipA6)
	h.waitChange(vipA4, 3, false)
	h.waitChange(vipA6, 3, false)
	mark = h.mark()
	h.must(h.pod.LB.Signal(syscall.SIGTERM))
	h.wantWithdrawnFirst(mark, 4)
	h.wantExit(h.pod.LB, 0)

	// An address of another process stays.
	h.must(h.Pod.IP("address", "add", vipA4, "dev", "lo"))
	h.startLB()
	h.wantRoutes(vipA4, vipA6)
	h.waitChange(vipA6, 5, false)
	h.stop(h.pod.LB)
	h.waitChange(vipA6, 6, true)
	h.waitChange(vipA4, 5, false)
}

// Each side refuses a process of another user.
func TestHostModeUsers(t *testing.T) {
	t.Parallel()
	h := newHostMode(t)
	h.startLB()
	h.startFrontend("--lb-uid=12345")
	h.waitLog(h.pod.Frontend, "the peer is spiffe://localhost/uid/0, expected spiffe://localhost/uid/12345")
	h.stop(h.pod.LB)
	h.stop(h.pod.Frontend)
	h.startLB("--frontend-uid=12345")
	h.startFrontend()
	h.waitLog(h.pod.LB, "client refused")
	h.waitLog(h.pod.LB, "expected spiffe://localhost/uid/12345")
	h.stop(h.pod.LB)
	h.startLB("--frontend-uid=12345", "--frontend-uid=0")
	h.wantRoutes(vipA4, vipA6)
	if s := h.lbStatus(); s.GetSpiffeId() != "spiffe://localhost/uid/0" || s.GetIdentityExpires() != nil {
		t.Errorf("got %s until %v", s.GetSpiffeId(), s.GetIdentityExpires())
	}
}
