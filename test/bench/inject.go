package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/osrg/gobgp/v4/pkg/packet/bgp"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/bird"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/lab"
)

const (
	// injectionHold is the hold time of the session, as the announcer offers it. KEEPALIVEs are sent
	// at a third of it (RFC 4271 section 4.4).
	injectionHold = 3 * time.Second
	// injectionDial bounds an attempt to connect: the kernel drops signed segments silently until
	// BIRD listens.
	injectionDial = 100 * time.Millisecond
	// prefixesPerUpdate is how many IPv4 prefixes of five bytes fit into 4096 bytes, with the
	// attributes.
	prefixesPerUpdate = 810
)

// injector is a BGP speaker of this process in the place of the frontend's announcer. It decides
// nothing and encodes nothing while a time is measured, so the result is the time of BIRD, the
// lower bound for any program that drives this BIRD over BGP.
type injector struct {
	fixture *fixture
	conn    net.Conn

	mu sync.Mutex // of writes
}

// The configuration that the frontend prints does not contain the key of the session.
var (
	injectionKey  = regexp.MustCompile(`password "[^"]*";`)
	injectionPort = regexp.MustCompile(`local ` + regexp.QuoteMeta(bird.LoopbackBIRD.String()) + ` port ([0-9]+) as`)
)

// startInjector starts a BIRD in the pod with the same configuration as the frontend would,
// announces every VIP from this process, and waits until all are at the gateway. Both end with
// the fixture.
func (fx *fixture) startInjector() (*injector, error) {
	text, err := fx.pod.Run(fx.ctx, "frontend", "render", "--trench-file="+fx.pod.TrenchFile(),
		"--external-interface="+lab.External, "--bird-dir="+fx.Dir)
	if err != nil {
		return nil, fmt.Errorf("BIRD's configuration: %w", err)
	}
	port := injectionPort.FindStringSubmatch(text)
	if port == nil {
		return nil, errors.New("BIRD's configuration has no port for the announcer")
	}
	key := rand.Text()
	// The only password is the key: gateways of a fixture have none.
	text = injectionKey.ReplaceAllString(text, `password "`+key+`";`)
	config := fx.path("injection.conf")
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		return nil, fmt.Errorf("BIRD's configuration: %w", err)
	}
	p, err := fx.Start(fx.Pod, "injection-bird", lab.BIRD(), "-f", "-c", config, "-s", fx.path("injection.ctl"))
	if err != nil {
		return nil, err
	}
	fx.guard(p)
	in := &injector{fixture: fx}
	if err := in.connect(net.JoinHostPort(bird.LoopbackBIRD.String(), port[1]), key); err != nil {
		return nil, fmt.Errorf("session with BIRD: %w: %s", err, p.Tail(5))
	}
	all, err := updates(true, fx.vips)
	if err != nil {
		return nil, err
	}
	if err := in.write(all); err != nil {
		return nil, err
	}
	return in, fx.waitAll()
}

// connect opens the session and keeps it up until the fixture ends.
func (in *injector) connect(address, key string) error {
	ctx, cancel := in.fixture.withTimeout()
	defer cancel()
	dialer := &net.Dialer{
		Timeout:   injectionDial,
		LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(bird.LoopbackAnnouncer, 0)),
		Control:   signWith(key, bird.LoopbackBIRD),
	}
	dialer.SetMultipathTCP(false) // excludes TCP_MD5SIG
	for in.conn == nil {
		err := in.fixture.Pod.Do(func() (err error) {
			in.conn, err = dialer.DialContext(ctx, "tcp4", address)
			return err
		})
		if ctx.Err() != nil {
			return errors.Join(err, context.Cause(ctx))
		}
	}
	reader := bufio.NewReader(in.conn)
	if err := errors.Join(in.conn.SetReadDeadline(time.Now().Add(waitTimeout)), in.handshake(reader)); err != nil {
		return errors.Join(err, in.conn.Close())
	}
	in.keepUp(reader)
	return nil
}

// handshake sends OPEN and KEEPALIVE and waits for BIRD's.
func (in *injector) handshake(r *bufio.Reader) error {
	capabilities := bgp.NewOptionParameterCapability([]bgp.ParameterCapabilityInterface{
		bgp.NewCapMultiProtocol(bgp.RF_IPv4_UC), bgp.NewCapMultiProtocol(bgp.RF_IPv6_UC),
		bgp.NewCapFourOctetASNumber(bird.LoopbackAS), bgp.NewCapRouteRefresh(),
	})
	open, err := bgp.NewBGPOpenMessage(bgp.AS_TRANS, uint16(injectionHold/time.Second), bird.LoopbackAnnouncer,
		[]bgp.OptionParameterInterface{capabilities})
	if err != nil {
		return err
	}
	hello, err := open.Serialize()
	if err != nil {
		return err
	}
	if err := in.write(append(hello, keepalive()...)); err != nil {
		return err
	}
	for {
		switch kind, err := skipMessage(r); {
		case err != nil:
			return err
		case kind == bgp.BGP_MSG_KEEPALIVE:
			return nil
		case kind != bgp.BGP_MSG_OPEN:
			return fmt.Errorf("BIRD sent a message of type %d", kind)
		}
	}
}

// keepUp sends KEEPALIVEs and discards the messages from BIRD, until the fixture ends.
func (in *injector) keepUp(r *bufio.Reader) {
	ctx, cancel := context.WithCancel(in.fixture.ctx)
	var tasks sync.WaitGroup
	tasks.Go(func() {
		tick := time.NewTicker(injectionHold / 3)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				if err := in.write(keepalive()); err != nil && ctx.Err() == nil {
					in.fixture.fail(fmt.Errorf("session with BIRD: %w", err))
				}
			case <-ctx.Done():
				return
			}
		}
	})
	tasks.Go(func() {
		for {
			// Hold timer (RFC 4271 section 4.2): each message from BIRD restarts it.
			err := in.conn.SetReadDeadline(time.Now().Add(injectionHold))
			if err == nil {
				_, err = skipMessage(r)
			}
			if err != nil {
				if ctx.Err() == nil {
					in.fixture.fail(fmt.Errorf("session with BIRD: %w", err))
				}
				return
			}
		}
	})
	in.fixture.ends = append(in.fixture.ends, func() error {
		// Cancel first, so that the errors after Close do not count as failures.
		cancel()
		err := in.conn.Close()
		tasks.Wait()
		return err
	})
}

// write sends messages in one write.
func (in *injector) write(messages []byte) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	if err := in.conn.SetWriteDeadline(time.Now().Add(waitTimeout)); err != nil {
		return err
	}
	_, err := in.conn.Write(messages)
	return err
}

// one returns a function that announces or withdraws one VIP.
func (in *injector) one(i int, up bool) (func() error, error) {
	m, err := updates(up, in.fixture.vips[i:i+1])
	return func() error { return in.write(m) }, err
}

// all returns a function that announces or withdraws all VIPs.
func (in *injector) all() (set func(up bool) error, err error) {
	announce, errAnnounce := updates(true, in.fixture.vips)
	withdraw, errWithdraw := updates(false, in.fixture.vips)
	return func(up bool) error {
		if up {
			return in.write(announce)
		}
		return in.write(withdraw)
	}, errors.Join(errAnnounce, errWithdraw)
}

// updates encodes the UPDATEs that announce or withdraw IPv4 VIPs, in their order.
func updates(announce bool, vips []vip.VIP) ([]byte, error) {
	nextHop, err := bgp.NewPathAttributeNextHop(bird.LoopbackAnnouncer)
	if err != nil {
		return nil, err
	}
	attributes := []bgp.PathAttributeInterface{
		bgp.NewPathAttributeOrigin(bgp.BGP_ORIGIN_ATTR_TYPE_IGP),
		bgp.NewPathAttributeAsPath([]bgp.AsPathParamInterface{
			bgp.NewAs4PathParam(bgp.BGP_ASPATH_ATTR_TYPE_SEQ, []uint32{bird.LoopbackAS}),
		}),
		nextHop,
	}
	var all []byte
	for part := range slices.Chunk(vips, prefixesPerUpdate) {
		prefixes := make([]bgp.PathNLRI, len(part))
		for i, v := range part {
			if prefixes[i].NLRI, err = bgp.NewIPAddrPrefix(v.Prefix()); err != nil {
				return nil, err
			}
		}
		m := bgp.NewBGPUpdateMessage(prefixes, nil, nil)
		if announce {
			m = bgp.NewBGPUpdateMessage(nil, attributes, prefixes)
		}
		b, err := m.Serialize()
		if err != nil {
			return nil, err
		}
		all = append(all, b...)
	}
	return all, nil
}

// keepalive returns a KEEPALIVE: a header without a body.
func keepalive() []byte {
	b := bytes.Repeat([]byte{0xff}, 16)
	return append(binary.BigEndian.AppendUint16(b, bgp.BGP_HEADER_LENGTH), bgp.BGP_MSG_KEEPALIVE)
}

// skipMessage reads a message and returns its type.
func skipMessage(r *bufio.Reader) (kind byte, err error) {
	var header [bgp.BGP_HEADER_LENGTH]byte
	if _, err := io.ReadFull(r, header[:]); err != nil {
		return 0, err
	}
	_, err = r.Discard(max(0, int(binary.BigEndian.Uint16(header[16:]))-len(header)))
	return header[18], err
}

// signWith has the kernel sign the segments to a peer (TCP-MD5, RFC 2385).
func signWith(key string, peer netip.Addr) func(network, address string, c syscall.RawConn) error {
	return func(_, _ string, c syscall.RawConn) error {
		sig := unix.TCPMD5Sig{Keylen: uint16(len(key))}
		sig.Addr.Family = unix.AF_INET
		copy(sig.Addr.Data[2:], peer.AsSlice()) // after the port, which is ignored
		copy(sig.Key[:], key)
		var set error
		err := c.Control(func(fd uintptr) {
			set = unix.SetsockoptTCPMD5Sig(int(fd), unix.IPPROTO_TCP, unix.TCP_MD5SIG, &sig)
		})
		return errors.Join(err, set)
	}
}
