package bmp

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/logs"
	"github.com/vipgate/vipgate/pkg/rtnetlink"
	"github.com/vipgate/vipgate/pkg/sockdiag"
	"github.com/vipgate/vipgate/pkg/speaker"
	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	// messageTimeout bounds the wait for the Initiation message, and for the rest of a message.
	messageTimeout = 5 * time.Second
	// maxConnections bounds the connections, those without an Initiation message included.
	maxConnections = 4
)

// Station listens for the BMP connection of one speaker. Of several connections the newest with an
// Initiation message counts: a speaker that restarted connects before its old connection ends.
type Station struct {
	// Speaker, unless zero, is where the speaker listens for BGP. Local connections are then accepted
	// from processes of its user, the own user and root only.
	Speaker netip.AddrPort

	address string
	log     *slog.Logger
	// throttle bounds the lines about connections that any process can open.
	throttle logs.Throttle

	mu sync.Mutex
	// listening is nil before Run.
	listening net.Addr
	// tables are the states of the connections with an Initiation message, in the order of those; the
	// last one counts. lost is why the last connection ended.
	tables []*table
	lost   error
}

var _ speaker.View = (*Station)(nil)

// New returns a station that Run lets listen on a TCP address.
func New(address string, log *slog.Logger) *Station {
	return &Station{
		address: address, log: log,
		lost: errors.New("the speaker has not connected yet; configure it to send BMP to " + address),
	}
}

// Addr returns the address on which the station listens, nil before it does.
func (station *Station) Addr() net.Addr {
	station.mu.Lock()
	defer station.mu.Unlock()
	return station.listening
}

// String implements task.Task.
func (station *Station) String() string { return "BMP station" }

// Run listens, and accepts connections until ctx ends.
func (station *Station) Run(ctx context.Context) error {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", station.address)
	if err != nil {
		return fmt.Errorf("failed to listen for BMP on %s: %w", station.address, err)
	}
	station.mu.Lock()
	station.listening = listener.Addr()
	station.mu.Unlock()
	var group sync.WaitGroup
	defer group.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(ctx, func() { _ = listener.Close() })()
	return station.accept(ctx, listener, &group)
}

// accept serves the connections of a listener until ctx ends.
func (station *Station) accept(ctx context.Context, listener net.Listener, group *sync.WaitGroup) error {
	slots := make(chan struct{}, maxConnections)
	// Of failures such as too many open files.
	retry := backoff.Backoff{Min: 10 * time.Millisecond, Max: time.Second}
	for failures := 0; ; {
		conn, err := listener.Accept()
		if ctx.Err() != nil {
			if err == nil {
				_ = conn.Close()
			}
			return nil
		}
		if err != nil {
			failures++
			station.throttle.Log(station.log.Warn, "", "failed to accept BMP connections, retrying", "error", err,
				"failures", failures)
			_ = retry.Wait(ctx)
			continue
		}
		retry.Reset()
		if err := station.refuses(conn); err != nil {
			station.throttle.Log(station.log.Warn, "user", "BMP connection refused", "remote", conn.RemoteAddr(), "error", err)
			_ = conn.Close()
			continue
		}
		select {
		case slots <- struct{}{}:
		default:
			station.log.Warn("too many BMP connections, refused another", "remote", conn.RemoteAddr())
			_ = conn.Close()
			continue
		}
		group.Go(func() {
			defer func() { <-slots }()
			station.serve(ctx, conn)
		})
	}
}

// refuses returns why a connection of a local process is not accepted.
func (station *Station) refuses(conn net.Conn) error {
	if !station.Speaker.IsValid() {
		return nil
	}
	local, remote := conn.LocalAddr().(*net.TCPAddr).AddrPort(), conn.RemoteAddr().(*net.TCPAddr).AddrPort()
	peer, err := sockdiag.TCP(remote, local)
	if err != nil {
		if _, unknown := sockdiag.TCP(local, remote); unknown != nil { // the kernel lacks the function
			station.throttle.Log(station.log.Warn, "unknown", "BMP connection of an unknown user accepted", "error", unknown)
			return nil
		}
		// The peer is in another network namespace, or bound its socket to an interface, which hides it.
		if !local.Addr().IsLoopback() && !isLocal(remote.Addr()) {
			return nil
		}
		return err
	}
	speaker, err := sockdiag.TCP(station.Speaker, netip.AddrPort{})
	switch {
	case !peer.Established:
		return errors.New("the process closed it")
	case peer.User == identity.UnmappedUser && !hasAllUsers():
		return fmt.Errorf("user %d stands for any user that has no ID here", peer.User)
	case peer.User == 0 || peer.User == uint32(os.Geteuid()) || err == nil && speaker.Listens && peer.User == speaker.User:
		return nil
	}
	return fmt.Errorf("user %d is not that of the speaker, which listens on %s, of this process, or root", peer.User,
		station.Speaker)
}

// userMap lists the users that have an ID in this user namespace (user_namespaces(7)).
var userMap = "/proc/self/uid_map"

// hasAllUsers reports whether every user has an ID here, so that 65534 is one user.
func hasAllUsers() bool {
	text, err := os.ReadFile(userMap)
	return err == nil && slices.Equal(strings.Fields(string(text)), []string{"0", "0", "4294967295"})
}

// isLocal reports whether packets to an address stay in this network namespace.
func isLocal(addr netip.Addr) bool {
	conn, err := rtnetlink.Dial()
	if err != nil {
		return true
	}
	defer conn.Close()
	route, err := conn.Lookup(addr.Unmap().WithZone(""), 0)
	return err == nil && route.Type == unix.RTN_LOCAL
}

// serve follows a connection to its end.
func (station *Station) serve(ctx context.Context, conn net.Conn) {
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	defer conn.Close()
	mine := &table{peers: map[peerKey]*peer{}}
	err := station.follow(conn, mine)
	station.mu.Lock()
	if i := slices.Index(station.tables, mine); i >= 0 {
		station.tables, station.lost = slices.Delete(station.tables, i, i+1), fmt.Errorf("BMP session lost: %w", err)
	}
	station.mu.Unlock()
	if ctx.Err() == nil {
		station.log.Warn("BMP session lost", "remote", conn.RemoteAddr(), "error", err)
	}
}

// follow applies the messages of a connection to mine.
func (station *Station) follow(conn net.Conn, mine *table) error {
	reader, buffer := bufio.NewReader(conn), []byte(nil)
	for {
		// BMP has no keepalives: a speaker without changes is silent. A dead host ends the connection by
		// TCP keepalives, and a hung speaker its session with the announcer.
		deadline := time.Time{}
		if !mine.ready {
			deadline = time.Now().Add(messageTimeout)
		}
		if err := conn.SetReadDeadline(deadline); err != nil {
			return err
		}
		if _, err := reader.Peek(1); err != nil {
			return err
		}
		if err := conn.SetReadDeadline(time.Now().Add(messageTimeout)); err != nil {
			return err
		}
		kind, body, err := readMessage(reader, &buffer)
		if err != nil {
			return err
		}
		initiated := mine.ready
		if err := station.apply(mine, kind, body); err != nil {
			return err
		}
		if !initiated {
			station.log.Info("BMP session up", "remote", conn.RemoteAddr(), "speaker", mine.version)
		}
	}
}

// apply applies a message. The Initiation message makes the connection the current one.
func (station *Station) apply(mine *table, kind byte, body []byte) error {
	station.mu.Lock()
	defer station.mu.Unlock()
	if err := mine.apply(kind, body, time.Now()); err != nil {
		return err
	}
	if kind == initiation {
		station.tables = append(slices.DeleteFunc(station.tables, func(t *table) bool { return t == mine }), mine)
	}
	return nil
}

// current returns the state of the newest connection, or why there is none. The caller holds mu.
func (station *Station) current() (*table, error) {
	if len(station.tables) == 0 {
		return nil, station.lost
	}
	return station.tables[len(station.tables)-1], nil
}

// Sessions returns the sessions that the speaker reported. A session that never came up since the
// speaker connected may be missing.
func (station *Station) Sessions(context.Context) (version string, list []speaker.Session, err error) {
	station.mu.Lock()
	defer station.mu.Unlock()
	current, err := station.current()
	if err != nil {
		return "", nil, err
	}
	for key, peer := range current.peers {
		for _, family := range vip.Families {
			session := speaker.Session{
				Peer: key.address, Family: family, State: "down", Since: peer.since, Exported: -1, LastError: peer.reason,
			}
			switch {
			case peer.up && peer.session.families[family]:
				session.Up, session.State = true, "up"
				if peer.exported[family] != nil {
					session.Exported = len(peer.exported[family])
				}
			case peer.up:
				continue
			}
			list = append(list, session)
		}
	}
	slices.SortFunc(list, func(a, b speaker.Session) int {
		return cmp.Or(a.Peer.Compare(b.Peer), cmp.Compare(a.Family, b.Family))
	})
	return current.version, list, nil
}

// Exported returns the VIPs of the peer's Adj-RIB-Out after the export policy, or
// [speaker.ErrUnknown] if the speaker does not send it (RFC 8671).
func (station *Station) Exported(_ context.Context, address netip.Addr, family vip.Family) (vip.Set, error) {
	station.mu.Lock()
	defer station.mu.Unlock()
	current, err := station.current()
	if err != nil {
		return nil, err
	}
	for key, peer := range current.peers {
		if key.address == address && peer.up && peer.exported[family] != nil {
			return maps.Clone(peer.exported[family]), nil
		}
	}
	return nil, speaker.ErrUnknown
}
