package bmp

import (
	"errors"
	"fmt"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	maxPeers = 1000
	// maxExported bounds the VIPs of one family that a peer's Adj-RIB-Out may have.
	maxExported = 100_000
)

// table is the state of a speaker as its messages describe it.
type table struct {
	version string // the speaker's description
	ready   bool   // the Initiation message arrived
	peers   map[peerKey]*peer
}

type peer struct {
	up        bool
	since     time.Time // arrival of the last Peer Up or Peer Down message
	reason    string    // of the last Peer Down message
	session   negotiated
	exported  [len(vip.Families)]vip.Set // nil if unknown
	overflown [len(vip.Families)]bool    // more than maxExported: unknown until the next Peer Up
}

// errTerminated ends the connection after a Termination message.
var errTerminated = errors.New("the speaker ended the BMP session")

// apply applies a message that arrived at some time. After an error the connection must end.
func (table *table) apply(kind byte, body []byte, at time.Time) error {
	switch kind {
	case initiation:
		version, err := parseInitiation(body)
		if err != nil {
			return fmt.Errorf("malformed Initiation message: %w", err)
		}
		table.version, table.ready = version, true
		return nil
	case termination:
		return errTerminated
	}
	if !table.ready {
		return fmt.Errorf("message of type %d before the Initiation message", kind)
	}
	if kind != routeMonitoring && kind != peerUp && kind != peerDown {
		return nil // RFC 7854 section 4.1: unknown types are ignored; the others have no use here
	}
	key, flags, body, err := parsePeer(body)
	if err != nil {
		return fmt.Errorf("malformed per-peer header: %w", err)
	}
	if key.kind >= locRIB {
		return nil
	}
	switch kind {
	case peerUp:
		err = table.up(key, body, at)
	case peerDown:
		err = table.down(key, body, at)
	case routeMonitoring:
		// Only the routes after the export policy are those that the peer receives.
		if flags&flagAdjRIBOut != 0 && flags&flagPostPolicy != 0 {
			err = table.routes(key, body)
		}
	}
	if err != nil {
		return fmt.Errorf("message of type %d about peer %s: %w", kind, key.address, err)
	}
	return nil
}

func (table *table) up(key peerKey, body []byte, at time.Time) error {
	session, err := parsePeerUp(body)
	if err != nil {
		return err
	}
	if _, known := table.peers[key]; !known && len(table.peers) >= maxPeers {
		return fmt.Errorf("more than %d peers", maxPeers)
	}
	table.peers[key] = &peer{up: true, since: at, session: session}
	return nil
}

func (table *table) down(key peerKey, body []byte, at time.Time) error {
	reason, gone, err := parsePeerDown(body)
	if err != nil {
		return err
	}
	if gone {
		delete(table.peers, key)
		return nil
	}
	old, known := table.peers[key]
	switch {
	case !known && len(table.peers) >= maxPeers:
		return fmt.Errorf("more than %d peers", maxPeers)
	case !known:
		old = &peer{since: at} // FRR reports the peers that are down, too
	case old.up:
		old = &peer{since: at, session: old.session}
	}
	old.reason = reason
	table.peers[key] = old
	return nil
}

func (table *table) routes(key peerKey, body []byte) error {
	peer := table.peers[key]
	// A message of a peer that is down, or whose prefixes have path identifiers, proves nothing.
	if peer == nil || !peer.up || peer.session.addPath[vip.IPv4] || peer.session.addPath[vip.IPv6] {
		return nil
	}
	changes, err := parseUpdate(body)
	if err != nil {
		return err
	}
	for _, family := range vip.Families {
		if changes.families[family] && peer.exported[family] == nil && !peer.overflown[family] {
			peer.exported[family] = vip.Set{}
		}
	}
	for _, v := range changes.withdrawn {
		delete(peer.exported[v.Family()], v)
	}
	for _, v := range changes.announced {
		family := v.Family()
		if peer.overflown[family] {
			continue
		}
		peer.exported[family][v] = struct{}{}
		if len(peer.exported[family]) > maxExported {
			peer.exported[family], peer.overflown[family] = nil, true
		}
	}
	return nil
}
