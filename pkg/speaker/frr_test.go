package speaker

import (
	"bufio"
	"context"
	"net"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
)

// serve answers commands on a socket as bgpd does, and returns the socket's path.
func serve(t *testing.T, answers map[string]string) string {
	path := filepath.Join(t.TempDir(), "bgpd.vty")
	listener, err := net.Listen("unix", path)
	harness.Must(t, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			for reader := bufio.NewReader(conn); ; {
				command, err := reader.ReadString(0)
				if err != nil {
					break
				}
				// In two parts, since the kernel may split an answer anywhere.
				answer := answers[strings.TrimSuffix(command, "\x00")] + "\x00\x00\x00\x00"
				_, _ = conn.Write([]byte(answer[:len(answer)/2]))
				_, _ = conn.Write([]byte(answer[len(answer)/2:]))
			}
			conn.Close()
		}
	}()
	t.Cleanup(func() { listener.Close(); <-done })
	return path
}

func TestFRRSessions(t *testing.T) {
	view := NewFRR(serve(t, map[string]string{
		"show version": "FRRouting 8.4.4 (host) on Linux(6.1).\r\n",
		"show bgp ipv4 unicast summary json": `{"as":8103,"peers":{
			"169.254.100.150":{"state":"Established","peerUptimeEstablishedEpoch":1700000000,"pfxRcd":1,"pfxSnt":3},
			"eth1":{"state":"Idle (Admin)","pfxRcd":0,"pfxSnt":0}}}`,
		"show bgp ipv6 unicast summary json": "\r\n", // no peer of the family
		"show bgp summary failed json":       `{"ipv4Unicast":{"peers":{"eth1":{"lastResetDueTo":"Admin. shutdown"}}}}`,
	}))
	ctx := harness.Context(t, 10*time.Second)
	version, sessions, err := view.Sessions(ctx)
	harness.Must(t, err)
	if version != "FRR 8.4.4" || len(sessions) != 2 {
		t.Fatalf("%s with %+v", version, sessions)
	}
	for _, session := range sessions {
		want := Session{
			Peer: netip.MustParseAddr("169.254.100.150"), Name: "169.254.100.150", Up: true, State: "Established",
			Since: time.Unix(1700000000, 0), Imported: 1, Exported: 3, Family: vip.IPv4,
		}
		if session.Name == "eth1" {
			want = Session{Name: "eth1", State: "Idle (Admin)", LastError: "Admin. shutdown", Family: vip.IPv4}
		}
		if session != want {
			t.Errorf("got %+v, want %+v", session, want)
		}
	}
}

func TestFRRExports(t *testing.T) {
	view := NewFRR(serve(t, map[string]string{
		"show bgp ipv6 unicast neighbors fd00::1 advertised-routes json": `{"advertisedRoutes":{"2000::1/128":{},"::/0":{}}}`,
	}))
	exported, err := view.Exported(harness.Context(t, 10*time.Second), netip.MustParseAddr("fd00::1"), vip.IPv6)
	harness.Must(t, err)
	if !exported.Has(vip.Require("2000::1/128")) {
		t.Errorf("exported %v", exported)
	}
	if _, err := view.Exported(t.Context(), netip.Addr{}, vip.IPv6); err == nil {
		t.Error("a peer without an address has a list")
	}
}

func TestFRRErrors(t *testing.T) {
	_, _, err := NewFRR(filepath.Join(t.TempDir(), "none")).Sessions(t.Context())
	harness.WantError(t, err, "group frrvty")
	_, _, err = NewFRR(serve(t, map[string]string{
		"show bgp ipv4 unicast summary json": "% Unknown",
	})).Sessions(t.Context())
	harness.WantError(t, err, `unreadable answer of FRR to "show bgp ipv4 unicast summary json"`)

	// A bgpd that does not answer costs the deadline only.
	hung, err := net.Listen("unix", filepath.Join(t.TempDir(), "hung"))
	harness.Must(t, err)
	defer hung.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, _, err = NewFRR(hung.Addr().String()).Sessions(ctx)
	harness.WantError(t, err, "timeout")
}
