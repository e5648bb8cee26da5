package lab

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/harness"
)

const waitTimeout = 30 * time.Second

func TestNamespaceIsolation(t *testing.T) {
	a, b := NewNetNS(t), NewNetNS(t)
	harness.Must(t, Veth(a, "left", b, "right"))
	links := func(ns *NetNS) (names []string) {
		harness.Must(t, ns.Do(func() error {
			list, err := net.Interfaces()
			for _, l := range list {
				names = append(names, l.Name)
			}
			return err
		}))
		return names
	}
	if got := fmt.Sprint(links(a)); got != "[lo left]" {
		t.Errorf("in a: %s", got)
	}
	if got := fmt.Sprint(links(b)); got != "[lo right]" {
		t.Errorf("in b: %s", got)
	}
	if _, err := net.InterfaceByName("left"); err == nil {
		t.Error("left is seen outside")
	}
	ctx := harness.Context(t, waitTimeout)
	if out, err := a.Run(ctx, "ip", "-br", "link"); err != nil || !strings.Contains(out, "left") {
		t.Errorf("a command in a: %q, %v", out, err)
	}
}

// A SYN is sent again after 1, 3 and 7 s, also by kernels that send it each second at first.
func TestTimeoutsOfSYNsDouble(t *testing.T) {
	harness.Must(t, NewNetNS(t).Do(func() error {
		text, err := os.ReadFile("/proc/sys/net/ipv4/tcp_syn_linear_timeouts")
		if errors.Is(err, os.ErrNotExist) {
			return nil
		}
		if err == nil && strings.TrimSpace(string(text)) != "0" {
			t.Errorf("as many timeouts are equal: %s", text)
		}
		return err
	}))
}

func TestRemoveLeftovers(t *testing.T) {
	mine := NewNetNS(t)
	// The namespace is named after a process that has ended, and a process still runs in it.
	dead := exec.Command("true")
	harness.Must(t, dead.Run())
	left := &NetNS{name: fmt.Sprintf("vg-%d-abcdef", dead.Process.Pid)}
	harness.Must(t, ip("netns", "add", left.name))
	orphan := exec.Command("sleep", "1000")
	harness.Must(t, left.Start(orphan))
	ended := make(chan error, 1)
	go func() { ended <- orphan.Wait() }()
	foreign := &NetNS{name: fmt.Sprintf("vg-%d-demo", dead.Process.Pid)}
	harness.Must(t, ip("netns", "add", foreign.name))
	t.Cleanup(func() { harness.Must(t, foreign.Close()) })
	harness.Must(t, RemoveLeftovers())
	select {
	case <-ended:
	case <-time.After(waitTimeout):
		t.Error("the orphan still runs")
		_ = orphan.Process.Kill()
		<-ended
	}
	if _, err := os.Lstat(left.Path()); !os.IsNotExist(err) {
		t.Errorf("the leftover is still there: %v", err)
	}
	for _, ns := range []*NetNS{mine, foreign} {
		if _, err := os.Lstat(ns.Path()); err != nil {
			t.Errorf("not a leftover: %v", err)
		}
	}
}

func TestCaptureDirections(t *testing.T) {
	a, b := NewNetNS(t), NewNetNS(t)
	harness.Must(t, Veth(a, "left", b, "right"))
	harness.Must(t, a.Addr("left", "10.0.0.1/24", "fd00::1/64"))
	harness.Must(t, b.Addr("right", "10.0.0.2/24", "fd00::2/64"))
	left, right := NewCapture(t, a, "left"), NewCapture(t, b, "right")
	ctx := harness.Context(t, waitTimeout)
	for _, to := range []string{"10.0.0.2", "fd00::2"} {
		harness.Must(t, a.Do(func() error {
			c, err := net.Dial("udp", net.JoinHostPort(to, "4242"))
			if err != nil {
				return err
			}
			defer c.Close()
			_, err = c.Write([]byte("x"))
			return err
		}))
		match := func(outgoing bool) func(Packet) bool {
			return func(p Packet) bool {
				return p.Outgoing == outgoing && p.Dst == netip.MustParseAddr(to) && p.Protocol == 17 &&
					p.DstPort == 4242
			}
		}
		if err := left.Wait(ctx, match(true)); err != nil {
			t.Errorf("left to %s: %v", to, err)
		}
		if err := right.Wait(ctx, match(false)); err != nil {
			t.Errorf("right to %s: %v", to, err)
		}
	}
}
