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
	// Foreign leaves source routing to another program: every configured VIP counts as routed, and
	// the kernel is neither read nor written.
	Foreign bool
	// ForeignRoutes leaves the routes of TableID to another program: they may be of any protocol. When
	// false they are BIRD's.
	ForeignRoutes bool
	// External returns the interface on which packets for VIPs arrive; nil to check no sysctls.
	External func() string
	// checkInterval is the time between two reconciliations without a notification. It may be long,
	// because the kernel reports lost notifications.
	checkInterval time.Duration
	// Log receives changes and failures; nil is slog.Default().
	Log *slog.Logger
}

func (options Options) withDefaults() Options {
	if options.Mark == 0 && options.Mask == 0 {
		options.Mark, options.Mask = DefaultMark, DefaultMask
	}
	options.TableID, options.Priority = cmp.Or(options.TableID, DefaultTableID), cmp.Or(options.Priority, DefaultPriority)
	options.checkInterval, options.Log = cmp.Or(options.checkInterval, 5*time.Second), cmp.Or(options.Log, slog.Default())
	return options
}

// Validate returns the first invalid option.
func (options Options) Validate() error {
	options = options.withDefaults()
	switch {
	case options.TableID >= 251 && options.TableID <= 255, options.TableID == math.MaxUint32:
		return fmt.Errorf("routing table %d: it or the next one belongs to the system; choose another ID, such as %d",
			options.TableID, DefaultTableID)
	case options.Priority < 1 || options.Priority > 32763:
		return fmt.Errorf("rule priority %d is not between those of the kernel's own rules; use 1 to 32763, such as %d",
			options.Priority, DefaultPriority)
	case options.Mark == 0:
		return fmt.Errorf("mark 0 does not distinguish VIP traffic from other traffic; choose another, such as %#x",
			DefaultMark)
	case options.Mark&^options.Mask != 0:
		return fmt.Errorf("mark %#x has bits outside its mask %#x; widen the mask or choose another", options.Mark,
			options.Mask)
	}
	return nil
}

func (options Options) blackholeTable() uint32 { return options.TableID + 1 }
