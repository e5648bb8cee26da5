package fwstate

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/nlmsg"
	"github.com/vipgate/vipgate/pkg/sysctl"
)

// Constants of linux/netfilter/nfnetlink_conntrack.h.
const (
	conntrackGet    = 1
	conntrackDelete = 2
	ctaMark         = 8
	ctaMarkMask     = 21
)

// FlushConntrack deletes the connection tracking entries with these fwmarks, so that the fwmarks
// can be assigned to different targets.
//
// The kernel walks the whole table for each request, which takes 3 ms with 262 144 nearly empty
// buckets. Adjacent fwmarks therefore share a request.
func (conn *Conn) FlushConntrack(fwmarks []uint32) error {
	if conn.config.Conntrack != ConntrackOn {
		return nil
	}
	for _, block := range plan.Blocks(fwmarks) {
		var request nlmsg.Messages
		request.Begin(unix.NFNL_SUBSYS_CTNETLINK<<8|conntrackDelete, unix.NLM_F_ACK, unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, 0)
		request.Uint32BE(ctaMark, block.First)
		// The mask ignores the bits within the block and those that are no bits of fwmarks.
		request.Uint32BE(ctaMarkMask, conn.config.FWMarkMask()&^(block.Length-1))
		rejected, err := conn.nft.Do(&request)
		switch err = errors.Join(err, rejected[0]); {
		case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EINVAL):
			return nil // the kernel has no connection tracking
		case err != nil && !errors.Is(err, unix.ENOENT): // no entry matched
			return fmt.Errorf("failed to flush connection tracking entries of %d fwmarks from %d on: %w", block.Length,
				block.First, err)
		}
	}
	return nil
}

// EvictConntrack makes the kernel remove expired connection tracking entries, which it may keep for
// a minute otherwise, if the table has at least a given part of its limit. It returns the earliest
// time of the next call, because live flows may fill the part, too, and a dump takes long.
func (conn *Conn) EvictConntrack(part float64) (next time.Time) {
	begin := time.Now()
	count, _ := strconv.ParseFloat(sysctl.Key("net/netfilter/nf_conntrack_count").Read(), 64)
	limit, _ := strconv.ParseFloat(sysctl.Key("net/netfilter/nf_conntrack_max").Read(), 64)
	if !full(count, limit, part) {
		return begin
	}
	// A dump removes expired entries. The filter is a mark that no entry has, so that it is short.
	var request nlmsg.Messages
	request.Begin(unix.NFNL_SUBSYS_CTNETLINK<<8|conntrackGet, unix.NLM_F_DUMP, unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, 0)
	request.Uint32BE(ctaMark, math.MaxUint32)
	request.Uint32BE(ctaMarkMask, math.MaxUint32)
	_, _ = conn.nft.Socket.Dump(&request, func([]byte) {}) // without it the kernel removes them later
	return time.Now().Add(20 * time.Since(begin))
}

// full reports whether count is at least a part of a limit, of which 0 is none.
func full(count, limit, part float64) bool { return limit > 0 && count >= part*limit }
