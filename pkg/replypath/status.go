package replypath

import (
	"errors"
	"fmt"
	"net/netip"
	"time"
)

// Status is the last observed kernel state.
type Status struct {
	// Complete reports whether the complete state was read back from the kernel.
	Complete bool
	Since    time.Time // last change of Complete
	// Problems lists the conditions that prevent a complete state, with their remedies.
	Problems []Problem
	// Peers lists the hosts on the link that sent packets to the pool, or may send some.
	Peers   []Peer
	Repairs uint64 // restored parts of the state since the start
	Dropped uint64 // replies to unknown peers since the last write of the rules
	Full    bool   // the peers map has no free element
	Evicted uint64 // peers evicted from the map
}

// Err returns the problems of an incomplete state with their remedies; nil if it is complete.
func (status Status) Err() (err error) {
	for _, problem := range status.Problems {
		err = errors.Join(err, fmt.Errorf("%s: %s; %s", problem.Object, problem.Detail, problem.Remedy))
	}
	if err == nil && !status.Complete { // before the first read of the kernel
		return errors.New("the kernel state is not complete")
	}
	return err
}

// Problem is one condition that prevents a complete state.
type Problem struct{ Object, Detail, Remedy string }

// Peer is a host on the link.
type Peer struct {
	MAC       string       // link-layer address, such as 02:00:00:00:00:01
	Addresses []netip.Addr // from the neighbor table
	FWMark    uint32       // connection mark of its flows
	Seen      bool         // the peer sent packets to the pool
	// Live: the peer has a valid neighbor entry or sent a packet within the last seconds. Flows
	// that the application opens use live peers.
	Live bool
}
