package main

import (
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/vipgate/vipgate/test/container"
	"github.com/vipgate/vipgate/test/lab"
)

// The sidecar of the manifest accepts and answers packets to VIPs, with a user, a capability and a
// root that a container runtime gives it; flows survive its end, and cleanup leaves nothing.
func TestSidecar(t *testing.T) {
	f := newFixture(t)
	before := f.kernelState()
	if err := f.request(vip4); err == nil {
		t.Fatal("the VIP answers without target")
	}

	p := f.start()
	m := f.pod.Container(t, "target")
	mask := fmt.Sprintf("%016x", container.Mask(m.SecurityContext.Capabilities.Add))
	want := container.Status{UID: "10003", GID: "10003", Effective: mask, Bounding: mask, NoNewPrivs: "0"}
	if got, err := container.ReadStatus(p.PID()); err != nil || got != want {
		t.Errorf("process %+v, %v; want %+v", got, err, want)
	}
	f.wantTraffic("with target")
	f.wantHealth()
	f.wantPeers(p)
	f.wantMetrics()

	flow, err := f.dial(net.JoinHostPort(vip4, port))
	f.must(err)
	defer flow.Close()
	use := func(when string) {
		t.Helper()
		if err := flow.use(); err != nil {
			t.Fatalf("flow %s: %v", when, err)
		}
	}
	use("at first")
	out, err := f.run(f.container(nil, "cleanup"))
	if err == nil || !strings.Contains(out, "owns this network namespace") {
		t.Errorf("cleanup beside run: %v %s", err, out)
	}

	f.must(p.Kill())
	use("after kill -9")
	f.wantTraffic("after kill -9")
	p = f.start()
	use("after a restart")
	if s, err := f.status(p); err != nil || s.GetRepairs() != 0 {
		t.Errorf("a restart repairs what is complete: %v %v", err, s)
	}
	f.stop(p)
	use("after SIGTERM")

	out, err = f.run(f.container(nil, "cleanup"))
	if err != nil || !strings.Contains(out, "removed: ") {
		t.Errorf("cleanup: %v %s", err, out)
	}
	if diff := cmp.Diff(before, f.kernelState()); diff != "" {
		t.Errorf("cleanup leaves (+):\n%s", diff)
	}
	if out, err := f.run(f.container(nil, "cleanup")); err != nil || out != "nothing to remove\n" {
		t.Errorf("second cleanup: %v %s", err, out)
	}
}

// wantPeers waits until the status has both trench pods, each with flows.
func (f *fixture) wantPeers(p *lab.Process) {
	f.t.Helper()
	f.eventually(func() error {
		s, err := f.status(p)
		peers := map[string]bool{}
		for _, peer := range s.GetPeers() {
			for _, a := range peer.GetAddresses() {
				peers[a] = peer.GetLive() && peer.GetSeen() && peer.GetFlows() > 0
			}
		}
		if err != nil || !s.GetComplete() || !peers[podA] || !peers[podB] {
			return fmt.Errorf("status %v, %v", s, err)
		}
		return nil
	})
}

// wantHealth asks for addresses as lb does.
func (f *fixture) wantHealth() {
	f.t.Helper()
	for service, want := range map[string]string{
		vip4: "SERVING", vip6: "SERVING", "Liveness": "SERVING", "20.0.1.1": "unknown service", "none": "unknown service",
	} {
		out, err := f.ask(f.a, targetAddress, service)
		if !strings.Contains(out, want) || (err == nil) != (want == "SERVING") {
			f.t.Errorf("health service %s: %v %s", service, err, out)
		}
	}
	for _, vip := range []string{vip4, vip6} {
		c, err := f.dial(net.JoinHostPort(vip, "7783"))
		f.must(err)
		f.must(c.SetReadDeadline(time.Now().Add(answerTime)))
		// A gRPC server would send its settings first.
		if n, err := c.Read(make([]byte, 1)); n != 0 || err == nil || isTimeout(err) {
			f.t.Errorf("the health port of %s: %d bytes, %v", vip, n, err)
		}
		f.must(c.Close())
	}
}

// wantMetrics scrapes as Prometheus does.
func (f *fixture) wantMetrics() {
	f.t.Helper()
	var scrape net.Conn
	f.must(f.a.Do(func() (err error) {
		scrape, err = (&net.Dialer{Timeout: answerTime}).DialContext(f.t.Context(), "tcp", targetAddress+":2226")
		return err
	}))
	defer scrape.Close()
	f.must(scrape.SetDeadline(time.Now().Add(answerTime)))
	_, err := io.WriteString(scrape, "GET /metrics HTTP/1.0\r\n\r\n")
	f.must(err)
	text, err := io.ReadAll(scrape)
	f.must(err)
	for _, want := range []string{
		"vipgate_target_complete 1\n", "vipgate_target_peers_full 0\n",
		`vipgate_target_peers{state="live"} 2`, `vipgate_target_flows{peer="`,
	} {
		if !strings.Contains(string(text), want) {
			f.t.Errorf("no %s in the metrics", want)
		}
	}
}

func isTimeout(err error) bool {
	timeout, ok := err.(net.Error)
	return ok && timeout.Timeout() && err != io.EOF
}

// An init container installs the kernel state and exits, or prints the reason of its failure.
func TestOnce(t *testing.T) {
	f := newFixture(t)
	out, err := f.run(f.container(nil, "run", "--once"))
	if err != nil || !strings.Contains(out, "complete for") {
		t.Fatalf("%v: %s", err, out)
	}
	f.wantTraffic("after --once")
	for _, c := range []struct {
		name      string
		variables map[string]string
		unable    bool
		want      string
	}{
		{"no capability", nil, true, "CAP_NET_ADMIN is missing"},
		{"no interface", map[string]string{"VIPGATE_INTERFACE": "net9"}, false, "net9"},
		{"host bits", map[string]string{"VIPGATE_POOL": "20.0.0.1/24"}, false, "host bits set; write 20.0.0.0/24"},
		{"subnets", map[string]string{"VIPGATE_PEER_SUBNET": "172.16.0.1/32"}, false, "new trench pods need the process"},
		{"no pool", map[string]string{"VIPGATE_POOL": ""}, false, "--pool"},
	} {
		t.Run(c.name, func(t *testing.T) {
			spoiled := f.container(c.variables, "run", "--once")
			if c.unable {
				spoiled.Capabilities, spoiled.Programs[0].Capabilities = nil, nil
			}
			if out, err := f.run(spoiled); err == nil || !strings.Contains(out, c.want) {
				t.Errorf("%v: %s", err, out)
			}
		})
	}
	if out, err := f.run(f.container(nil, "run", "--once")); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	f.wantTraffic("after the options are corrected")
}

// Without its interface the target is not ready, and its status names the interface. It becomes
// ready once the interface is back.
func TestInterfaceGoesAndComes(t *testing.T) {
	f := newFixture(t)
	p := f.start()
	f.must(f.target.Sysctl("net.ipv6.conf.targets.keep_addr_on_down", "1"))
	f.must(f.target.IP("link", "set", "targets", "down"))
	for _, service := range []string{vip4, "Readiness"} {
		f.eventually(func() error {
			if _, err := f.ask(f.target, "127.0.0.1", service); err == nil {
				return fmt.Errorf("%s is SERVING", service)
			}
			return nil
		})
	}
	if s, err := f.status(p); err == nil || s.GetComplete() || len(s.GetProblems()) == 0 {
		t.Errorf("status without the interface: %v %v", err, s)
	}
	f.must(f.target.IP("link", "set", "targets", "up"))
	f.eventually(func() error {
		_, err := f.ask(f.target, "127.0.0.1", vip4)
		return err
	})
	f.wantTraffic("after the interface came back")
}
