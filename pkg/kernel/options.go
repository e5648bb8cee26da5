package kernel

import (
	"fmt"
	"log/slog"
	"time"
)

// Defaults of [Options].
const (
	DefaultTableID       = 4096
	DefaultPriority      = 100
	DefaultMark          = 0x01000000
	DefaultMask          = 0xff000000
	DefaultCheckInterval = time.Second
)

// Options are the table, priorities and mark that source routing uses in the network namespace.
// Zero fields have the defaults above.
type Options struct {
	// TableID is the routing table that holds the gateways' routes. The one after it holds the
	// blackhole routes.
	TableID uint32
	// Priority is that of the rule that looks up TableID; the rules that drop packets without a
	// gateway have the next two.
	Priority int
	// Mark is put on packets from a VIP, in the bits of Mask only; the other bits of a packet's
	// mark stay.
	Mark, Mask uint32
	// External is the interface on which packets for VIPs arrive; empty: its sysctls are not
	// checked.
	External string
	// CheckInterval is the time between two reconciliations when the kernel reports no change.
	CheckInterval time.Duration
	// Log receives changes and failures; nil is slog.Default().
	Log *slog.Logger
}

func (o Options) withDefaults() Options {
	if o.TableID == 0 {
		o.TableID = DefaultTableID
	}
	if o.Priority == 0 {
		o.Priority = DefaultPriority
	}
	if o.Mark == 0 && o.Mask == 0 {
		o.Mark, o.Mask = DefaultMark, DefaultMask
	}
	if o.CheckInterval == 0 {
		o.CheckInterval = DefaultCheckInterval
	}
	if o.Log == nil {
		o.Log = slog.Default()
	}
	return o
}

// Validate returns the first invalid option.
func (o Options) Validate() error {
	o = o.withDefaults()
	switch {
	case o.TableID >= 252 && o.TableID <= 255, o.TableID == 251, o.TableID == 1<<32-1:
		return fmt.Errorf("routing table %d: it or the next one belongs to the system: choose another table ID, such as %d", o.TableID, DefaultTableID)
	case o.Priority < 1 || o.Priority > 32763:
		return fmt.Errorf("rule priority %d: it must lie between the kernel's own rules: 1 to 32763, such as %d", o.Priority, DefaultPriority)
	case o.Mark == 0:
		return fmt.Errorf("mark 0 cannot tell VIP traffic from other traffic: choose another, such as %#x", DefaultMark)
	case o.Mark&^o.Mask != 0:
		return fmt.Errorf("mark %#x has bits outside its mask %#x: widen the mask or choose another mark", o.Mark, o.Mask)
	case o.CheckInterval < 0:
		return fmt.Errorf("check interval %v is negative", o.CheckInterval)
	}
	return nil
}

func (o Options) blackholeTable() uint32 { return o.TableID + 1 }
