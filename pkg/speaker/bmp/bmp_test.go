package bmp

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/osrg/gobgp/v4/pkg/packet/bgp"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/speaker"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Messages of real daemons: GoBGP 3.10.0, and FRR 8.4.4 with `bmp connect`.
const (
	gobgpInit = "0300000019040002" + "0005476f42475000010006332e31302e30"
	frrInit   = "030000002004" + "0001000f4652526f7574696e6720382e342e340002000373706b"
	// gobgpUp has the peer 10.9.0.2 with both families.
	gobgpUp = "03000000c003" + "00000000000000000000" + "0000000000000000000000000a090002" +
		"0000fdea0a0900026b0a000000000000" +
		"0000000000000000000000000a090001e04700b3ffffffffffffffffffffffffffffffff00410104fde9005a0a090001240222020049" +
		"0402766d0001040001000101040002000141040000fde90506000100010002ffffffffffffffffffffffffffffffff003b0104fdea0006" +
		"0a0900021e021c01040001000101040002000102004002007841040000fdea46004700"
	frrDown = "030000003302" + "00000000000000000000" + "0000000000000000000000000a090002" +
		"0000fdea0a0900026b0a000000000000" + "020000"
)

var gateway = netip.MustParseAddr("10.9.0.2")

func decode(tb testing.TB, text string) []byte {
	tb.Helper()
	b, err := hex.DecodeString(text)
	harness.Must(tb, err)
	return b
}

// message encodes a message about a peer.
func message(kind, flags byte, body ...byte) []byte {
	peer := make([]byte, peerLength)
	peer[1] = flags
	copy(peer[22:], gateway.AsSlice())
	m := append([]byte{protocolVersion, 0, 0, 0, 0, kind}, append(peer, body...)...)
	binary.BigEndian.PutUint32(m[1:], uint32(len(m)))
	return m
}

// update encodes an UPDATE of IPv4 routes.
func update(tb testing.TB, announced, withdrawn []string) []byte {
	tb.Helper()
	list := func(texts []string) (nlri []bgp.PathNLRI) {
		for _, text := range texts {
			prefix, err := bgp.NewIPAddrPrefix(netip.MustParsePrefix(text))
			harness.Must(tb, err)
			nlri = append(nlri, bgp.PathNLRI{NLRI: prefix})
		}
		return nlri
	}
	var attributes []bgp.PathAttributeInterface
	if len(announced) > 0 {
		hop, err := bgp.NewPathAttributeNextHop(gateway)
		harness.Must(tb, err)
		attributes = []bgp.PathAttributeInterface{bgp.NewPathAttributeOrigin(0), bgp.NewPathAttributeAsPath(nil), hop}
	}
	b, err := bgp.NewBGPUpdateMessage(list(withdrawn), attributes, list(announced)).Serialize()
	harness.Must(tb, err)
	return b
}

// read applies all messages of a stream.
func read(r io.Reader) (*table, error) {
	state, reader, buffer := &table{peers: map[peerKey]*peer{}}, bufio.NewReader(r), []byte(nil)
	for {
		kind, body, err := readMessage(reader, &buffer)
		if errors.Is(err, io.EOF) {
			return state, nil
		}
		if err == nil {
			err = state.apply(kind, body, time.Unix(1, 0))
		}
		if err != nil {
			return state, err
		}
	}
}

func TestSessionsOfDaemons(t *testing.T) {
	up, down := decode(t, gobgpUp), decode(t, frrDown)
	ceased := message(peerDown, 0, append([]byte{downReceived}, cease(t)...)...)
	for name, test := range map[string]struct {
		messages []byte // after FRR's Initiation message
		want     string
	}{
		"initiation":  {nil, ""},
		"peer up":     {up, "true both "},
		"peer down":   {slices.Concat(up, down), "false both the speaker closed the session"},
		"peer not up": {down, "false none the speaker closed the session"},
		"cease": {
			slices.Concat(up, ceased),
			"false both the gateway sent NOTIFICATION code 6(cease) subcode 2(administrative shutdown)",
		},
		"peer removed":  {slices.Concat(up, message(peerDown, 0, downDeconfigured)), ""},
		"local RIB":     {locRIBMessage(), ""},
		"unknown types": {slices.Concat(message(statisticsReport, 0, 1, 2), message(77, 0)), ""},
	} {
		t.Run(name, func(t *testing.T) {
			state, err := read(bytes.NewReader(slices.Concat(decode(t, frrInit), test.messages)))
			harness.Must(t, err)
			got := ""
			for key, peer := range state.peers {
				if key.address != gateway {
					t.Errorf("peer %s", key.address)
				}
				families := map[[2]bool]string{{true, true}: "both", {}: "none"}[peer.session.families]
				got += fmt.Sprintf("%t %s %s", peer.up, families, peer.reason)
			}
			if state.version != "FRRouting 8.4.4" || got != test.want {
				t.Errorf("version %q, %q; want %q", state.version, got, test.want)
			}
		})
	}
}

func cease(tb testing.TB) []byte {
	tb.Helper()
	const shutdown = bgp.BGP_ERROR_SUB_ADMINISTRATIVE_SHUTDOWN
	b, err := bgp.NewBGPNotificationMessage(bgp.BGP_ERROR_CEASE, shutdown, nil).Serialize()
	harness.Must(tb, err)
	return b
}

func locRIBMessage() []byte {
	m := message(routeMonitoring, 0, 1)
	m[headerLength] = locRIB
	return m
}

func TestExportedRoutes(t *testing.T) {
	const out = flagAdjRIBOut | flagPostPolicy
	one := []string{"20.0.0.1/32"}
	start := slices.Concat(decode(t, frrInit), decode(t, gobgpUp))
	for name, test := range map[string]struct {
		stream []byte
		want   string // of IPv4; "unknown" without Adj-RIB-Out
	}{
		"no routes":       {nil, "unknown"},
		"received routes": {message(routeMonitoring, flagPostPolicy, update(t, one, nil)...), "unknown"},
		"before policy":   {message(routeMonitoring, flagAdjRIBOut, update(t, one, nil)...), "unknown"},
		"end of transfer": {message(routeMonitoring, out, update(t, nil, nil)...), "[]"},
		"routes": {
			slices.Concat(
				message(routeMonitoring, out, update(t, []string{"20.0.0.1/32", "20.0.0.2/32", "0.0.0.0/0"}, nil)...),
				message(routeMonitoring, out, update(t, nil, one)...),
			), "[20.0.0.2/32]",
		},
		"another session": {
			slices.Concat(
				message(routeMonitoring, out, update(t, one, nil)...), decode(t, frrDown), decode(t, gobgpUp),
			), "unknown",
		},
	} {
		t.Run(name, func(t *testing.T) {
			state, err := read(bytes.NewReader(slices.Concat(start, test.stream)))
			harness.Must(t, err)
			station := &Station{tables: []*table{state}}
			got := "unknown"
			if set, err := station.Exported(t.Context(), gateway, vip.IPv4); err == nil {
				got = fmt.Sprint(set.Sorted())
			} else if !errors.Is(err, speaker.ErrUnknown) {
				t.Error(err)
			}
			if got != test.want {
				t.Errorf("got %s, want %s", got, test.want)
			}
			if _, err := station.Exported(t.Context(), gateway, vip.IPv6); !errors.Is(err, speaker.ErrUnknown) {
				t.Errorf("IPv6: %v", err)
			}
		})
	}
}

func TestMalformedMessages(t *testing.T) {
	start := decode(t, frrInit)
	for name, stream := range map[string][]byte{
		"version":              {2, 0, 0, 0, 6, 4},
		"length below header":  {3, 0, 0, 0, 5, 4},
		"length above bound":   {3, 0, 4, 0, 1, 4},
		"truncated":            start[:len(start)-1],
		"before initiation":    decode(t, gobgpUp),
		"initiation TLV":       {3, 0, 0, 0, 11, 4, 0, 1, 0, 2, 'x'},
		"per-peer header":      slices.Concat(start, []byte{3, 0, 0, 0, 7, 3, 0}),
		"peer up":              slices.Concat(start, message(peerUp, 0, 1, 2, 3)),
		"open of another type": slices.Concat(start, message(peerUp, 0, append(make([]byte, 20), cease(t)...)...)),
		"peer down":            slices.Concat(start, message(peerDown, 0)),
		"notification":         slices.Concat(start, message(peerDown, 0, downSent, 1)),
		"update": slices.Concat(start, decode(t, gobgpUp),
			message(routeMonitoring, flagAdjRIBOut|flagPostPolicy, cease(t)...)),
		"termination": slices.Concat(start, []byte{3, 0, 0, 0, 6, termination}),
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := read(bytes.NewReader(stream)); err == nil {
				t.Error("accepted")
			}
		})
	}
}

// A connection without an Initiation message changes nothing, and the newest speaker counts.
func TestStationFollowsNewestSpeaker(t *testing.T) {
	station := New("127.0.0.1:0", slog.New(slog.DiscardHandler))
	ended := make(chan error)
	go func() { ended <- station.Run(t.Context()) }()
	t.Cleanup(func() { harness.Must(t, <-ended) })
	dial := func(stream ...[]byte) net.Conn {
		t.Helper()
		conn, err := net.Dial("tcp", station.Addr().String())
		harness.Must(t, err)
		t.Cleanup(func() { _ = conn.Close() })
		_, err = conn.Write(slices.Concat(stream...))
		harness.Must(t, err)
		return conn
	}
	wait := func(want string) {
		t.Helper()
		await.True(t, want, func() bool {
			version, list, err := station.Sessions(t.Context())
			up := slices.IndexFunc(list, func(s speaker.Session) bool { return s.Up && s.Exported == -1 })
			got := fmt.Sprintf("%s %d %d", version, len(list), up)
			if err != nil {
				got = err.Error()
			}
			return strings.HasPrefix(got, want)
		})
	}
	wait("the speaker has not connected yet; configure it to send BMP to 127.0.0.1:0")
	await.True(t, "a listener", func() bool { return station.Addr() != nil })
	if _, err := station.Exported(t.Context(), gateway, vip.IPv4); err == nil {
		t.Error("routes without a connection")
	}
	first := dial(decode(t, gobgpInit), decode(t, gobgpUp))
	wait("3.10.0 2 0")
	noise := dial([]byte("GET / HTTP/1.1\r\n\r\n"))
	if _, err := noise.Read(make([]byte, 1)); err == nil {
		t.Error("noise was answered")
	}
	dial() // silent
	wait("3.10.0 2 0")
	second := dial(decode(t, frrInit))
	wait("FRRouting 8.4.4 0 -1")
	harness.Must(t, first.Close())
	_, err := second.Write(decode(t, gobgpUp))
	harness.Must(t, err)
	wait("FRRouting 8.4.4 2 0")
	harness.Must(t, second.Close())
	wait("BMP session lost: EOF")
	// An older connection that lives counts again.
	older := dial(decode(t, gobgpInit), decode(t, gobgpUp))
	wait("3.10.0 2 0")
	newer := dial(decode(t, frrInit))
	wait("FRRouting 8.4.4 0 -1")
	harness.Must(t, newer.Close())
	wait("3.10.0 2 0")
	harness.Must(t, older.Close())
	wait("BMP session lost: EOF")
}

// failing fails to accept a number of times.
type failing struct {
	net.Listener
	failures atomic.Int32
}

func (l *failing) Accept() (net.Conn, error) {
	if l.failures.Add(-1) >= 0 {
		return nil, &net.OpError{Op: "accept", Err: unix.EMFILE}
	}
	return l.Listener.Accept()
}

func TestStationSurvivesFailuresToAccept(t *testing.T) {
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	harness.Must(t, err)
	listener := &failing{Listener: inner}
	listener.failures.Store(3)
	station, ctx := New("", slog.New(slog.DiscardHandler)), t.Context()
	ended := make(chan error)
	var group sync.WaitGroup
	context.AfterFunc(ctx, func() { _ = inner.Close() })
	go func() { defer group.Wait(); ended <- station.accept(ctx, listener, &group) }()
	t.Cleanup(func() { harness.Must(t, <-ended) })
	conn, err := net.Dial("tcp", inner.Addr().String())
	harness.Must(t, err)
	defer conn.Close()
	_, err = conn.Write(decode(t, frrInit))
	harness.Must(t, err)
	await.True(t, "a session", func() bool { _, _, err := station.Sessions(ctx); return err == nil })
}

// dialAs connects as a user, with a socket that is bound to an interface unless that is "".
func dialAs(t *testing.T, uid int, address, device string) (conn net.Conn) {
	t.Helper()
	dialer := net.Dialer{Timeout: 10 * time.Second, Control: func(_, _ string, raw syscall.RawConn) (err error) {
		controlErr := raw.Control(func(fd uintptr) {
			if device != "" {
				err = unix.SetsockoptString(int(fd), unix.SOL_SOCKET, unix.SO_BINDTODEVICE, device)
			}
		})
		return errors.Join(err, controlErr)
	}}
	harness.Must(t, harness.As(uid, func() (err error) {
		conn, err = dialer.Dial("tcp", address)
		return err
	}))
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// stationOf starts a station for a speaker of a user.
func stationOf(t *testing.T, user int, address string) *Station {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root, to become other users")
	}
	speaker, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	harness.Must(t, err)
	t.Cleanup(func() { harness.Must(t, unix.Close(speaker)) })
	harness.Must(t, errors.Join(unix.Fchown(speaker, user, -1),
		unix.Bind(speaker, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}), unix.Listen(speaker, 1)))
	name, err := unix.Getsockname(speaker)
	harness.Must(t, err)
	station := New(address, slog.New(slog.DiscardHandler))
	station.Speaker = netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), uint16(name.(*unix.SockaddrInet4).Port))
	harness.Run(t, station.Run)
	await.True(t, "a listener", func() bool { return station.Addr() != nil })
	return station
}

func TestStationRefusesUsers(t *testing.T) {
	const all, some = "         0          0 4294967295\n", "         0     100000      65536\n"
	defer func(before string) { userMap = before }(userMap)
	for name, test := range map[string]struct {
		speaker  int
		users    string
		accepted map[int]bool
	}{
		"own user":      {1234, all, map[int]bool{0: true, 1234: true, 1235: false, 65534: false}},
		"user 65534":    {65534, all, map[int]bool{0: true, 65534: true, 65533: false}},
		"unmapped user": {65534, some, map[int]bool{0: true, 65534: false}},
	} {
		t.Run(name, func(t *testing.T) {
			userMap = filepath.Join(t.TempDir(), "uid_map")
			harness.Must(t, os.WriteFile(userMap, []byte(test.users), 0o600))
			station := stationOf(t, test.speaker, "127.0.0.1:0")
			for uid, accepted := range test.accepted {
				conn := dialAs(t, uid, station.Addr().String(), "")
				_, _ = conn.Write(decode(t, frrInit)) // fails once it is refused
				if !accepted {
					wantRefused(t, station, conn, fmt.Sprintf("user %d", uid))
					continue
				}
				await.True(t, "a session", func() bool { _, _, err := station.Sessions(t.Context()); return err == nil })
				harness.Must(t, conn.Close())
				await.True(t, "no session", func() bool { _, _, err := station.Sessions(t.Context()); return err != nil })
			}
		})
	}
}

// A socket that is bound to an interface is unknown to the kernel's lookup without it.
func TestStationRefusesBoundSockets(t *testing.T) {
	station := stationOf(t, 1234, "0.0.0.0:0")
	interfaces, err := net.Interfaces()
	harness.Must(t, err)
	for _, i := range interfaces {
		addresses, err := i.Addrs()
		harness.Must(t, err)
		for _, address := range addresses {
			if address := address.(*net.IPNet).IP.To4(); address != nil && i.Flags&net.FlagUp != 0 {
				at := fmt.Sprintf("%s:%d", address, station.Addr().(*net.TCPAddr).Port)
				conn := dialAs(t, 1235, at, i.Name)
				_, _ = conn.Write(decode(t, frrInit))
				wantRefused(t, station, conn, "a socket of "+i.Name)
			}
		}
	}
}

func wantRefused(t *testing.T, station *Station, conn net.Conn, what string) {
	t.Helper()
	harness.Must(t, conn.SetReadDeadline(time.Now().Add(30*time.Second)))
	var timeout net.Error
	if _, err := conn.Read(make([]byte, 1)); errors.As(err, &timeout) && timeout.Timeout() {
		t.Errorf("%s is accepted", what)
	}
	if _, _, err := station.Sessions(t.Context()); err == nil {
		t.Errorf("%s has a session", what)
	}
}

// FuzzMessages checks that no stream makes the station panic, or exceed its bounds.
func FuzzMessages(f *testing.F) {
	start := slices.Concat(decode(f, frrInit), decode(f, gobgpUp))
	f.Add(slices.Concat(decode(f, gobgpInit), decode(f, gobgpUp), decode(f, frrDown)))
	f.Add(slices.Concat(start, message(routeMonitoring, flagAdjRIBOut|flagPostPolicy,
		update(f, []string{"20.0.0.1/32"}, []string{"20.0.0.2/32"})...)))
	f.Add(slices.Concat(start, message(peerDown, 0, append([]byte{downSent}, cease(f)...)...), locRIBMessage()))
	f.Fuzz(func(t *testing.T, stream []byte) {
		state, _ := read(bytes.NewReader(stream))
		for key, peer := range state.peers {
			if !key.address.IsValid() || peer.since.IsZero() {
				t.Errorf("peer %v: %+v", key, peer)
			}
			for _, family := range vip.Families {
				for v := range peer.exported[family] {
					if v.Family() != family {
						t.Errorf("%s among %s", v, family)
					}
				}
			}
		}
	})
}
