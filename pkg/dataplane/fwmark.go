package dataplane

import (
	"fmt"
	"log/slog"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
)

const (
	// fwmarkRange is the number of fwmarks reserved for targets.
	fwmarkRange = 1 << 16
	// maxProbed limits the batch size of fwmark checks.
	maxProbed = 1024
)

// fwmarks allocates fwmarks that neither a target nor another process uses.
type fwmarks struct {
	first, mask uint32
	log         *slog.Logger
	// next is the first candidate for the next new target.
	next uint32
	// refused maps fwmarks that another process uses to a description of the use.
	refused map[uint32]string
	// probed maps the fwmarks checked in this pass to their use by another process, or "".
	// probing is the size of the next batch of checks.
	probed  map[uint32]string
	probing int
}

// begin starts a pass: another process may have changed its fwmarks since the previous one.
func (f *fwmarks) begin() { f.probed, f.probing = map[uint32]string{}, 1 }

// allocate returns an unused fwmark for a new target, the least recently used first.
func (f *fwmarks) allocate(observed *observation) (uint32, error) {
	end := min(uint64(f.first)+fwmarkRange, uint64(f.mask)+1)
	for range end - uint64(f.first) {
		fwmark := f.next
		if uint64(fwmark) >= end || fwmark < f.first {
			fwmark = f.first
		}
		f.next = fwmark + 1
		// Tables 253 to 255 are default, main and local.
		if observed.targets[fwmark].FWMark == fwmark || f.refused[fwmark] != "" || fwmark >= 253 && fwmark <= 255 {
			continue
		}
		user, err := f.user(observed, fwmark)
		if err != nil || user == "" {
			return fwmark, err
		}
		f.refused[fwmark] = user
		f.log.Warn("fwmark used by another process, skipping it", "fwmark", fwmark, "by", user)
	}
	return 0, fmt.Errorf("all fwmarks from %d to %d are used", f.first, end-1)
}

// user returns how another process uses a fwmark, or "". It also checks successors of the
// fwmark, in batches that grow during a pass.
func (f *fwmarks) user(observed *observation, first uint32) (string, error) {
	if observed.observed.Targets[first] != nil {
		return "chain inet " + plan.TableName + " " + plan.TargetChain(first) + ", or an element for it, exists already", nil
	}
	if user, ok := f.probed[first]; ok {
		return user, nil
	}
	var batch []uint32
	for fwmark := uint64(first); fwmark <= uint64(f.mask) && len(batch) < f.probing; fwmark++ {
		batch = append(batch, uint32(fwmark))
	}
	// One target needs one check; a large new stream must not need a netlink exchange per target.
	f.probing = min(4*f.probing, maxProbed)
	users, err := observed.kernel.UsedByOthers(batch)
	if err != nil {
		return "", fmt.Errorf("check for other users of fwmarks %d to %d: %w", first, batch[len(batch)-1], err)
	}
	for _, fwmark := range batch {
		f.probed[fwmark] = users[fwmark]
	}
	return users[first], nil
}
