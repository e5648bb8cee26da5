package kernel

import (
	"cmp"
	"fmt"
	"log/slog"
	"math"
	"time"
)

// Defaults of [Options].
const (
	DefaultTableID  = 4096
	DefaultPriority = 100
	DefaultMark     = 0x01000000
	DefaultMask     = 0xff000000
)

// Options are the table, priorities and mark that source routing uses in the network namespace.
// Zero fields have the defaults above.
type Options struct {
	// TableID is the routing table that holds the gateways' routes. The one after it holds the
	// blackhole routes.
	TableID uint32
	// Priority is the priority of the rule that looks up TableID. The rules that drop packets
	// without a gateway have the next two priorities.
	Priority int
	// Mark is the fwmark of packets from a VIP. It changes only the bits of Mask.
	Mark, Mask uint32
	// External returns the interface on which packets for VIPs arrive. If nil, sysctls are not
	// checked.
	External func() string
	// checkInterval is the time between two reconciliations without a notification. It may be long,
	// because the kernel reports lost notifications.
	checkInterval time.Duration
	// Log receives changes and failures; nil is slog.Default().
	Log *slog.Logger
}

func (o Options) withDefaults() Options {
	if o.Mark == 0 && o.Mask == 0 {
		o.Mark, o.Mask = DefaultMark, DefaultMask
	}
	o.TableID, o.Priority = cmp.Or(o.TableID, DefaultTableID), cmp.Or(o.Priority, DefaultPriority)
	o.checkInterval, o.Log = cmp.Or(o.checkInterval, 5*time.Second), cmp.Or(o.Log, slog.Default())
	return o
}

// Validate returns the first invalid option.
func (o Options) Validate() error {
	o = o.withDefaults()
	switch {
	case o.TableID >= 251 && o.TableID <= 255, o.TableID == math.MaxUint32:
		return fmt.Errorf("routing table %d: it or the next one belongs to the system; choose another ID, such as %d",
			o.TableID, DefaultTableID)
	case o.Priority < 1 || o.Priority > 32763:
		return fmt.Errorf("rule priority %d is not between those of the kernel's own rules; use 1 to 32763, such as %d",
			o.Priority, DefaultPriority)
	case o.Mark == 0:
		return fmt.Errorf("mark 0 does not distinguish VIP traffic from other traffic; choose another, such as %#x",
			DefaultMark)
	case o.Mark&^o.Mask != 0:
		return fmt.Errorf("mark %#x has bits outside its mask %#x; widen the mask or choose another", o.Mark, o.Mask)
	}
	return nil
}

func (o Options) blackholeTable() uint32 { return o.TableID + 1 }
