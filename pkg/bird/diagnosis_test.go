package bird_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/bird"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
)

// failsWith waits for an error of the IPv4 gateway that is down.
func (p *pod) failsWith(parts ...string) bird.GatewayState {
	p.t.Helper()
	return p.await("an error with "+strings.Join(parts, ", "), func(s bird.State) bool {
		if len(s.Gateways) != 1 || s.Gateways[0].Up || s.Gateways[0].LastErrorAt.IsZero() {
			return false
		}
		for _, part := range parts {
			if !strings.Contains(s.Gateways[0].LastError, part) {
				return false
			}
		}
		return true
	}).Gateways[0]
}

// BIRD clears the error at its next attempt, and the gateway resets the next connection.
func TestWrongASIsAlwaysNamed(t *testing.T) {
	run(t, "ip", "link", "set", "lo", "up")
	l := newLink(t, vip.IPv4)
	gw := l.Router(routerConfig{AS: 65001})
	p := newPod(t, l.Dev)
	p.Configure([]trench.Gateway{gatewayOf(vip.IPv4)}, []vip.VIP{vip4})
	p.Start()

	first := p.failsWith("BGP Error: Bad peer AS: 65001", "remoteASN 4248829953")
	// Two more NOTIFICATIONs: three attempts of both sides are over.
	p.await("later errors", func(s bird.State) bool {
		g := s.Gateways[0]
		if !strings.Contains(g.LastError, "Bad peer AS: 65001") {
			t.Fatalf("the error is no longer named: %+v", g)
		}
		return g.LastErrorAt.After(first.LastErrorAt.Add(3 * time.Second))
	})

	// A new configuration has no errors of the previous one.
	p.Configure([]trench.Gateway{gatewayOf(vip.IPv4, func(g *trench.Gateway) {
		g.RemoteASN, g.RemotePort, g.LocalPort = 65001, 9, 10180
	})}, []vip.VIP{vip4})
	g := p.failsWith("Connection refused")
	if strings.Contains(g.LastError, "AS") {
		t.Errorf("error of the earlier configuration: %+v", g)
	}

	p.Configure([]trench.Gateway{gatewayOf(vip.IPv4, func(g *trench.Gateway) {
		g.LocalASN, g.RemoteASN = 65003, 65001
	})}, []vip.VIP{vip4})
	p.failsWith("Received: Bad peer AS", "localASN 65003")
	p.Configure([]trench.Gateway{gatewayOf(vip.IPv4, func(g *trench.Gateway) { g.RemoteASN = 65001 })}, []vip.VIP{vip4})
	p.await("session", up("gateway-ipv4"))
	if g := p.Gateway("gateway-ipv4"); !g.LastErrorAt.IsZero() {
		t.Errorf("a session that is up has an error: %+v", g)
	}
	gw.Kill()
	if g := p.failsWith(""); strings.Contains(g.LastError, "AS") {
		t.Errorf("error from before the session: %+v", g)
	}
}

func TestUnsignedSideIsNamed(t *testing.T) {
	run(t, "ip", "link", "set", "lo", "up")
	l := newLink(t, vip.IPv4)
	gw := l.Router(routerConfig{})
	p := newPod(t, l.Dev)
	file := filepath.Join(p.Options.Dir, "key")
	harness.Must(t, os.WriteFile(file, []byte("own"), 0o600))
	signed := gatewayOf(vip.IPv4, func(g *trench.Gateway) { g.PasswordFile = file })
	p.Configure([]trench.Gateway{signed}, []vip.VIP{vip4})
	p.Start()
	p.failsWith("TCP-MD5: the gateway does not sign")
	gw.Reconfigure(routerConfig{Password: "another"})
	p.failsWith("TCP-MD5: the passwords of both sides differ")
	p.Configure([]trench.Gateway{gatewayOf(vip.IPv4)}, []vip.VIP{vip4})
	p.failsWith("TCP-MD5: the gateway signs, and this side does not")
	gw.Reconfigure(routerConfig{Password: "own"})
	p.Configure([]trench.Gateway{signed}, []vip.VIP{vip4})
	p.await("session", up("gateway-ipv4"))
}
