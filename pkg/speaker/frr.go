package speaker

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// DefaultFRR is bgpd's socket for vtysh, which the group frrvty may use.
const DefaultFRR = "/var/run/frr/bgpd.vty"

// maxAnswer bounds an answer of bgpd in bytes. A route of an answer takes about 300 bytes.
const maxAnswer = 64 << 20

// frr reads bgpd as vtysh does, but with `show` commands only. bgpd does not ask for privileges
// beyond access to the socket: after a connection it is in the view node.
type frr struct {
	socket  string
	version string // after the last answer; "" after an error, since bgpd may have been replaced
}

// NewFRR returns a view of FRR's bgpd by its vty socket.
func NewFRR(socket string) View { return &frr{socket: socket} }

var frrFamilies = [len(vip.Families)]string{vip.IPv4: "ipv4", vip.IPv6: "ipv6"}

// frrPeer is an entry of `show bgp summary json` and of `show bgp summary failed json`.
type frrPeer struct {
	State       string `json:"state"`
	Since       int64  `json:"peerUptimeEstablishedEpoch"` // in seconds
	Received    int    `json:"pfxRcd"`
	Sent        int    `json:"pfxSnt"`
	Description string `json:"desc"`
	LastReset   string `json:"lastResetDueTo"`
}

type frrSummary struct {
	Peers map[string]frrPeer `json:"peers"`
}

// Sessions implements View.
func (view *frr) Sessions(ctx context.Context) (version string, list []Session, err error) {
	defer func() {
		if err != nil {
			view.version = ""
		}
	}()
	conn, err := view.dial(ctx)
	if err != nil {
		return "", nil, err
	}
	defer conn.Close()
	if view.version == "" {
		answer, err := ask(conn, "show version")
		if err != nil {
			return "", nil, err
		}
		view.version = parseVersion(string(answer))
	}
	var isDown bool
	for _, family := range vip.Families {
		var summary frrSummary
		if err := askJSON(conn, "show bgp "+frrFamilies[family]+" unicast summary json", &summary); err != nil {
			return "", nil, err
		}
		for name, peer := range summary.Peers {
			session := Session{
				Name: name, Family: family, Up: peer.State == "Established", State: peer.State,
				Imported: peer.Received, Exported: peer.Sent,
			}
			session.Peer, _ = netip.ParseAddr(name) // zero for an interface
			if session.Up {
				session.Since = time.Unix(peer.Since, 0)
			}
			isDown = isDown || !session.Up
			list = append(list, session)
		}
	}
	if isDown {
		view.explain(conn, list)
	}
	return view.version, list, nil
}

// explain adds the errors of sessions that are down, if bgpd has them.
func (view *frr) explain(conn net.Conn, list []Session) {
	var failed struct {
		IPv4 frrSummary `json:"ipv4Unicast"`
		IPv6 frrSummary `json:"ipv6Unicast"`
	}
	if askJSON(conn, "show bgp summary failed json", &failed) != nil {
		return // the states are complete without it
	}
	for i, session := range list {
		peers := failed.IPv4.Peers
		if session.Family == vip.IPv6 {
			peers = failed.IPv6.Peers
		}
		if !session.Up {
			list[i].LastError = strings.TrimSpace(peers[session.Name].LastReset)
		}
	}
}

// Exported implements View.
func (view *frr) Exported(ctx context.Context, peer netip.Addr, family vip.Family) (vip.Set, error) {
	if !peer.IsValid() {
		return nil, errors.New("the peer has no address")
	}
	conn, err := view.dial(ctx)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	var answer struct {
		Routes map[string]json.RawMessage `json:"advertisedRoutes"`
	}
	command := fmt.Sprintf("show bgp %s unicast neighbors %s advertised-routes json", frrFamilies[family], peer)
	if err := askJSON(conn, command, &answer); err != nil {
		return nil, err
	}
	exported := vip.Set{}
	for prefix := range answer.Routes {
		if v, err := vip.Parse(prefix); err == nil {
			exported[v] = struct{}{}
		}
	}
	return exported, nil
}

// dial connects to bgpd. The connection has the deadline of ctx.
func (view *frr) dial(ctx context.Context) (net.Conn, error) {
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "unix", view.socket)
	if err != nil {
		return nil, fmt.Errorf("failed to connect to FRR's bgpd: %w; does it run, and is this process in the group frrvty?",
			err)
	}
	if deadline, ok := ctx.Deadline(); ok {
		if err := conn.SetDeadline(deadline); err != nil {
			conn.Close()
			return nil, err
		}
	}
	return conn, nil
}

// endOfAnswer precedes the status, the last byte of an answer.
var endOfAnswer = []byte{0, 0, 0}

// ask sends a command and returns bgpd's answer.
func ask(conn net.Conn, command string) ([]byte, error) {
	if _, err := conn.Write(append([]byte(command), 0)); err != nil {
		return nil, fmt.Errorf("failed to send %q to FRR: %w", command, err)
	}
	var answer []byte
	var buffer [64 << 10]byte
	for {
		n, err := conn.Read(buffer[:])
		answer = append(answer, buffer[:n]...)
		if end := len(answer) - len(endOfAnswer) - 1; end >= 0 && bytes.HasPrefix(answer[end:], endOfAnswer) {
			if status := answer[len(answer)-1]; status != 0 {
				return nil, fmt.Errorf("FRR refused %q: status %d: %s", command, status, bytes.TrimSpace(answer[:end]))
			}
			return answer[:end], nil
		}
		switch {
		case errors.Is(err, io.EOF):
			return nil, fmt.Errorf("FRR closed the connection during %q", command)
		case err != nil:
			return nil, fmt.Errorf("failed to read FRR's answer to %q: %w", command, err)
		case len(answer) > maxAnswer:
			return nil, fmt.Errorf("FRR's answer to %q exceeds %d bytes", command, maxAnswer)
		}
	}
}

func askJSON(conn net.Conn, command string, into any) error {
	answer, err := ask(conn, command)
	if err != nil {
		return err
	}
	if answer = bytes.TrimSpace(answer); len(answer) == 0 {
		return nil // as FRR answers without any peer of the family
	}
	if err := json.Unmarshal(answer, into); err != nil {
		return fmt.Errorf("unreadable answer of FRR to %q: %w", command, err)
	}
	return nil
}

// parseVersion returns "FRR 8.4.4" from the first line of `show version`.
func parseVersion(text string) string {
	fields := strings.Fields(text)
	for i, field := range fields {
		if field == "FRRouting" && i+1 < len(fields) {
			return "FRR " + strings.TrimSuffix(fields[i+1], ",")
		}
	}
	return "FRR"
}
