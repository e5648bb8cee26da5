package fwstate

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/nlmsg"
	"github.com/vipgate/vipgate/pkg/vip"
)

// maxSolicited bounds the neighbors that are probed at once. Of more neighbors a random subset
// is probed, so that all have their turn.
const maxSolicited = 256

// SolicitNeighbors makes the kernel probe FAILED neighbors, as if it had a packet for them.
// Without packets the kernel never does so, and keeps the state FAILED forever while the table
// is small.
func (f *Conn) SolicitNeighbors(addrs map[netip.Addr]struct{}) error {
	var m nlmsg.Messages
	var asked []netip.Addr
	for key := range f.failedNeighbors {
		if _, ok := addrs[key.addr]; !ok {
			continue
		}
		if len(asked) == maxSolicited {
			break
		}
		header := [ndmsgLength]byte{0: systemFamily(vip.FamilyOf(key.addr)), 10: unix.NTF_USE}
		copy(header[4:], nlmsg.Uint32Bytes(uint32(int32(key.link))))
		// Without NLM_F_CREATE: a removed entry needs no probe.
		m.Begin(unix.RTM_NEWNEIGH, unix.NLM_F_REPLACE|unix.NLM_F_ACK, header[:]...)
		m.Bytes(unix.NDA_DST, key.addr.AsSlice())
		m.End()
		asked = append(asked, key.addr)
	}
	if len(asked) == 0 {
		return nil
	}
	refused, err := f.rt.Exchange(&m)
	if err != nil {
		return fmt.Errorf("probe %d failed neighbors: %w", len(asked), err)
	}
	for _, i := range slices.Sorted(maps.Keys(refused)) {
		if !errors.Is(refused[i], unix.ENOENT) && !errors.Is(refused[i], unix.ENODEV) {
			return fmt.Errorf("probe failed neighbor %s: %w", asked[i], refused[i])
		}
	}
	return nil
}
