package lab

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/harness"
)

// startReceived creates a lab with a receiver, and a BIRD in the pod that announces prefixes to
// it.
func startReceived(t *testing.T, routes ...string) (context.Context, *Lab, *Receiver, *Control) {
	t.Helper()
	if errs := Missing(); len(errs) > 0 {
		t.Fatal(errs)
	}
	ctx := harness.Context(t, waitTimeout)
	l, err := New()
	harness.Must(t, err)
	t.Cleanup(func() { harness.Must(t, l.Close()) })
	r, err := StartReceiver(l.Gateway, ReceiverA())
	harness.Must(t, err)
	t.Cleanup(func() { harness.Must(t, r.Close()) })
	c := GatewayConfig{
		Name: "peer", RouterID: PodExternal4, LocalAS: PodAS, RemoteAS: GatewayAS, Port: BGPPort,
		Local: []netip.Addr{PodExternal4, PodExternal6}, Peers: []netip.Addr{GatewayA4, GatewayA6},
	}
	for _, p := range routes {
		c.Routes = append(c.Routes, netip.MustParsePrefix(p))
	}
	peer, err := StartGateway(l.Pod, l.Dir, c)
	harness.Must(t, err)
	t.Cleanup(func() { harness.Must(t, peer.Process.Kill()) })
	var control *Control
	harness.Must(t, Eventually(ctx, 10*time.Millisecond, func() (err error) {
		control, err = peer.Control(ctx)
		return err
	}))
	t.Cleanup(func() { control.Close() })
	return ctx, l, r, control
}

func TestReceiverUpdatesFromBIRD(t *testing.T) {
	four, six := netip.MustParsePrefix("20.0.0.0/30"), netip.MustParsePrefix("2000::/64")
	ctx, _, r, control := startReceived(t, four.String(), six.String())
	established, err := r.Established(ctx)
	harness.Must(t, err)
	held, err := r.WaitCount(ctx, 2)
	harness.Must(t, err)
	if held.Before(established) {
		t.Errorf("the prefixes came at %v, before the session at %v", held, established)
	}
	for _, p := range []netip.Prefix{four, six} {
		said := r.Table()[p]
		if said == nil || !slices.Equal(said.ASPath, []uint32{PodAS}) || said.GracefulShutdown() {
			t.Errorf("%v was announced with %+v", p, said)
		}
	}
	// The peer received the default routes.
	harness.Check(t, Eventually(ctx, 10*time.Millisecond, func() error {
		routes := map[netip.Prefix]Route{}
		out, err := control.Command(learned)
		if err != nil {
			return err
		}
		parseRoutes(out, routes)
		for p, hop := range map[string]netip.Addr{"0.0.0.0/0": GatewayA4, "::/0": GatewayA6} {
			if got := routes[netip.MustParsePrefix(p)]; got.NextHop != hop ||
				!slices.Equal(got.ASPath, []string{fmt.Sprint(GatewayAS)}) {
				return fmt.Errorf("the peer holds %+v, want %s via %v", routes, p, hop)
			}
		}
		return nil
	}))

	// The session survives a ROUTE-REFRESH from the peer (RFC 2918).
	if out, err := control.Command("reload in trench0"); err != nil || !strings.Contains(out, "trench0: reloading") {
		t.Errorf("the peer cannot request the routes again: %s, error %v", out, err)
	}

	mark, before := r.Mark(), time.Now()
	if _, err := control.Command("disable routes4"); err != nil {
		t.Fatal(err)
	}
	received, err := r.WaitFor(ctx, mark, func(h PrefixUpdate) bool { return h.Prefix == four })
	harness.Must(t, err)
	if !received.Withdrawn || received.Lost || received.Attributes != nil || received.At.Before(before) ||
		received.At.After(time.Now()) {
		t.Errorf("received %+v, want a withdrawal now", received)
	}
	if got := r.Since(mark); len(got) != 1 || len(r.Table()) != 1 {
		t.Errorf("received %+v and holds %v", got, r.Table())
	}
	r.Forget()
	if mark := r.Mark(); mark != 3 || len(r.Since(0)) != 0 {
		t.Errorf("after forgetting the mark is %d with %d receipts", mark, len(r.Since(0)))
	}
	if _, err := control.Command("enable routes4"); err != nil {
		t.Fatal(err)
	}
	if _, err := r.WaitFor(ctx, 0, func(h PrefixUpdate) bool { return h.Prefix == four && !h.Withdrawn }); err != nil {
		t.Error(err)
	}
}

func TestReceiverResetAndRefuse(t *testing.T) {
	ctx, l, r, control := startReceived(t, "20.0.0.0/30", "2000::/64")
	if _, err := r.WaitCount(ctx, 2); err != nil {
		t.Fatal(err)
	}
	mark := r.Mark()
	r.Reset()
	down, err := r.Down(ctx)
	harness.Must(t, err)
	for _, h := range r.Since(mark)[:2] {
		if !h.Withdrawn || !h.Lost {
			t.Errorf("received %+v at the end of the session", h)
		}
	}
	// BIRD's status shows the reset only until the session is back, a second later. Its log keeps
	// it.
	log := filepath.Join(l.Dir, "peer", "bird.log")
	harness.Check(t, Eventually(ctx, 10*time.Millisecond, func() error {
		text, err := os.ReadFile(log)
		if err == nil && !hasText(string(text), "trench0: Received: Administrative reset") {
			err = fmt.Errorf("BIRD says of the reset: %s", text)
		}
		return err
	}))
	// BIRD comes back after its error wait time.
	up, err := r.Established(ctx)
	harness.Must(t, err)
	if !up.After(down) {
		t.Errorf("up at %v, down at %v", up, down)
	}
	if _, err := r.WaitCount(ctx, 2); err != nil {
		t.Fatal(err)
	}
	harness.Must(t, r.Refuse())
	mark = r.Mark()
	if _, err := control.Command(`restart "trench*"`); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Down(ctx); err != nil {
		t.Fatal(err)
	}
	harness.Must(t, r.Listen())
	if _, err := r.WaitFor(ctx, mark, func(h PrefixUpdate) bool { return !h.Withdrawn }); err != nil {
		t.Error(err)
	}
	var ups int
	for _, e := range r.Sessions() {
		if e.Up {
			ups++
		} else if e.Reason == nil {
			t.Errorf("no reason for %+v", e)
		}
	}
	if ups < 5 {
		t.Errorf("%d sessions came up, want 5 or 6", ups)
	}
}

func TestReceiverWaitContext(t *testing.T) {
	ns := NewNetNS(t)
	harness.Must(t, ns.Addr("lo", "169.254.100.150/32"))
	r, err := StartReceiver(ns, ReceiverConfig{Local: []netip.Addr{GatewayA4}})
	harness.Must(t, err)
	defer r.Close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, first := r.WaitFor(ctx, 0, func(PrefixUpdate) bool { return true })
	_, second := r.WaitCount(ctx, 1)
	_, third := r.Established(ctx)
	for _, err := range []error{first, second, third} {
		if !errors.Is(err, context.Canceled) {
			t.Errorf("the wait ended with %v", err)
		}
	}
	waiting := make(chan error)
	go func() {
		_, err := r.WaitCount(t.Context(), 1)
		waiting <- err
	}()
	harness.Check(t, r.Close())
	if err := <-waiting; err == nil {
		t.Error("the wait survived the receiver")
	}
}

// Any bytes that are not a BGP message end the connection.
func TestReceiverInvalidMessages(t *testing.T) {
	ns := NewNetNS(t)
	harness.Must(t, ns.Addr("lo", "169.254.100.150/32"))
	r, err := StartReceiver(ns, ReceiverConfig{Local: []netip.Addr{GatewayA4}})
	harness.Must(t, err)
	defer r.Close()
	for name, bytes := range map[string][]byte{
		"short length": message(bgpOpen, nil)[:17],
		"zeros":        make([]byte, 64),
		"no OPEN":      message(bgpKeepalive, nil),
		"empty OPEN":   message(bgpOpen, nil),
		"hold time 0":  message(bgpOpen, []byte{4, 0, 1, 0, 0, 1, 1, 1, 1, 0}),
		"open end":     message(bgpOpen, []byte{4, 0, 1, 0, 3, 1, 1, 1, 1, 3, 2, 9, 1}),
	} {
		t.Run(name, func(t *testing.T) {
			var conn net.Conn
			harness.Must(t, ns.Do(func() (err error) {
				conn, err = net.DialTimeout("tcp", netip.AddrPortFrom(GatewayA4, BGPPort).String(), waitTimeout)
				return err
			}))
			defer conn.Close()
			if _, err := conn.Write(bytes); err != nil {
				t.Fatal(err)
			}
			if name == "short length" {
				harness.Must(t, conn.(*net.TCPConn).CloseWrite())
			}
			harness.Must(t, conn.SetReadDeadline(time.Now().Add(waitTimeout)))
			if _, err := io.ReadAll(conn); isTimeout(err) {
				t.Error("the connection stays")
			}
		})
	}
	if got := r.Sessions(); len(got) > 0 {
		t.Errorf("sessions %+v", got)
	}
}

func TestParseUpdate(t *testing.T) {
	attrs := []byte{
		0x40, attrOrigin, 1, 0,
		0x50, attrASPath, 0, 10, 2, 2, 0, 0, 0x1f, 0xa7, 0, 0, 0x1f, 0xa7, // extended length
		0xc0, attrCommunities, 8, 0xff, 0xff, 0, 0, 0, 1, 0, 2,
		0x40, attrLocalPref, 4, 0, 0, 0, 7,
		0x80, attrMPUnreach, 3 + 3, 0, afiIPv6, safiUnicast, 16, 0x20, 1,
		0x80, attrMPReach, 5 + 4 + 3, 0, afiIPv6, safiUnicast, 4, 1, 2, 3, 4, 0, 16, 0x20, 2,
	}
	body := []byte{0, 4, 24, 10, 0, 1}
	body = append(append(body, 0, byte(len(attrs))), attrs...)
	body = append(body, 32, 10, 0, 2, 1, 8, 11)
	s := &speaker{as4: true}
	routes, err := s.update(body, nil)
	harness.Must(t, err)
	var got []string
	for _, r := range routes {
		got = append(got, fmt.Sprint(r.Prefix, " ", r.Withdrawn, " ", r.Attributes.GracefulShutdown()))
	}
	want := []string{
		"10.0.1.0/24 true false", "2001::/16 true false", "2002::/16 false true", "10.0.2.1/32 false true",
		"11.0.0.0/8 false true",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got  %v\nwant %v", got, want)
	}
	if a := routes[4].Attributes; !slices.Equal(a.ASPath, []uint32{8103, 8103}) || a.LocalPref != 7 ||
		a.Communities[1] != 0x10002 {
		t.Errorf("attributes %+v", a)
	}
	for n := range body { // truncated at any byte: rejected or shorter, never out of bounds
		_, _ = s.update(body[:n], nil)
	}
}

func isTimeout(err error) bool {
	var timeout net.Error
	return errors.As(err, &timeout) && timeout.Timeout()
}

func hasText(out, text string) bool {
	return strings.Contains(strings.ToLower(out), strings.ToLower(text))
}

// RFC 4271 section 6.8: while a session is established, a second connection of
// the same peer is closed.
func TestReceiverSecondSession(t *testing.T) {
	ns := NewNetNS(t)
	harness.Must(t, ns.Addr("lo", "169.254.100.150/32"))
	r, err := StartReceiver(ns, ReceiverConfig{Local: []netip.Addr{GatewayA4}})
	harness.Must(t, err)
	defer r.Close()
	ctx := harness.Context(t, waitTimeout)
	dial := func() net.Conn {
		var conn net.Conn
		harness.Must(t, ns.Do(func() (err error) {
			conn, err = net.DialTimeout("tcp", netip.AddrPortFrom(GatewayA4, BGPPort).String(), waitTimeout)
			return err
		}))
		t.Cleanup(func() { conn.Close() })
		hello := append(message(bgpOpen, []byte{4, 0x1f, 0xa7, 0, 30, 1, 1, 1, 1, 0}), message(bgpKeepalive, nil)...)
		harness.Must(t, errors.Join(conn.SetDeadline(time.Now().Add(waitTimeout)), writeAll(conn, hello)))
		return conn
	}
	dial()
	if _, err := r.Established(ctx); err != nil {
		t.Fatal(err)
	}
	answer, err := io.ReadAll(dial())
	harness.Must(t, err)
	if want := message(bgpNotify, []byte{notifyCease, ceaseClash}); !strings.HasSuffix(string(answer), string(want)) {
		t.Errorf("the second connection received %x", answer)
	}
	if got := r.Sessions(); len(got) != 1 || !got[0].Up {
		t.Errorf("sessions %+v", got)
	}
}

func writeAll(w io.Writer, b []byte) error {
	_, err := w.Write(b)
	return err
}
