package dataplane

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Of linux/netfilter/nfnetlink_conntrack.h: deletion is of all entries that match.
const (
	conntrackDelete = 2
	ctaMark         = 8
	ctaMarkMask     = 21
)

// forget removes connection-tracking entries with the marks of these numbers, so
// that the number of a target that is gone can be used again. Without connection
// tracking there are none.
func (f *fabric) forget(numbers []uint32) error {
	if f.o.Stateless {
		return nil
	}
	for _, n := range numbers {
		var m messages
		m.begin(unix.NFNL_SUBSYS_CTNETLINK<<8|conntrackDelete, unix.NLM_F_ACK, unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, 0)
		m.big(ctaMark, n)
		m.big(ctaMarkMask, f.o.Mask)
		m.end()
		refused, err := f.ct.acked(&m)
		if err == nil {
			err = refused[0]
		}
		// The kernel has no such subsystem.
		if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EINVAL) {
			return nil
		}
		// Nothing matched.
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("forget the connections of mark %d: %w", n, err)
		}
	}
	return nil
}
