package replypath

import (
	"net/netip"
	"time"
)

// Status is what is known of the kernel state.
type Status struct {
	// Complete reports whether all of the state was read back from the kernel.
	Complete bool
	Since    time.Time // Complete has this value
	// Problems are what keeps the state from being complete, each with its remedy.
	Problems []Problem
	// Peers are the hosts on the link that sent packets to the pool, or may do so.
	Peers   []Peer
	Repairs uint64 // parts of the state that were restored since the start
	Dropped uint64 // replies without a known peer, since the rules were written
	Full    bool   // the map of peers has no room for another one
	Evicted uint64 // peers that were removed from a map that was three quarters full
}

// Problem is one condition that keeps the state from being complete.
type Problem struct{ Object, Detail, Remedy string }

// Peer is a host on the link.
type Peer struct {
	MAC       string       // link address, such as 02:00:00:00:00:01
	Addresses []netip.Addr // from the neighbor table
	FWMark    uint32       // connection mark of its flows
	Seen      bool         // it sent packets to the pool
	// Live: it has a valid neighbor entry, or sent a packet in the last seconds. Flows that the
	// application opens use live peers.
	Live bool
}
