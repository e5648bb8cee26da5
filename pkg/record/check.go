package record

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	// maxName is the longest name in bytes: far more than the trench file takes.
	maxName = 255
	// maxSize bounds the size of a table.
	maxSize = 1 << 17
)

// check tells what is wrong with a record.
func (t Target) check() error {
	if t.Number == 0 {
		return errors.New("its number is 0")
	}
	if err := errors.Join(checkName(t.Stream), checkName(t.Name), t.Stage.check()); err != nil {
		return err
	}
	if len(t.IPs) == 0 || len(t.IPs) > len(vip.Families) {
		return fmt.Errorf("it has %d addresses", len(t.IPs))
	}
	for i, a := range t.IPs {
		if !a.IsValid() || a.Is4In6() || a.Zone() != "" {
			return fmt.Errorf("%q is not the address of a target", a)
		}
		if slices.ContainsFunc(t.IPs[:i], func(b netip.Addr) bool { return vip.FamilyOf(a) == vip.FamilyOf(b) }) {
			return fmt.Errorf("it has two %s addresses", vip.FamilyOf(a))
		}
	}
	return nil
}

// check tells what is wrong with a record.
func (s Stream) check() error {
	if err := errors.Join(checkName(s.Name), s.Stage.check()); err != nil {
		return err
	}
	switch {
	case s.Size < 2 || s.Size > maxSize:
		return fmt.Errorf("a table has %d entries", s.Size)
	case s.Seed == 0:
		return errors.New("its seed is 0")
	case s.DrainTime < 0:
		return fmt.Errorf("its drain time is %s", s.DrainTime)
	case slices.ContainsFunc(s.VIPs, vip.VIP.IsZero):
		return errors.New("it has a VIP that is none")
	case !ascending(s.VIPs, vip.Compare):
		return errors.New("its VIPs are not in their order")
	}
	for _, table := range s.Tables {
		for _, name := range table {
			if err := checkName(name); err != nil {
				return err
			}
		}
		if !ascending(table, strings.Compare) {
			return errors.New("the names of a table are not in their order")
		}
	}
	return nil
}

func (s Stage) check() error {
	if s < Pending || s > Removing {
		return fmt.Errorf("there is no stage %d", s)
	}
	return nil
}

// checkName refuses names that could not stand in the kernel or in a line of a log.
func checkName(s string) error {
	if s == "" || len(s) > maxName || strings.ContainsFunc(s, func(c rune) bool { return c <= ' ' || c > '~' }) {
		return fmt.Errorf("%q is not a name", s[:min(len(s), maxName)])
	}
	return nil
}

// ascending tells whether each is greater than the one before.
func ascending[T any](list []T, compare func(a, b T) int) bool {
	for i := 1; i < len(list); i++ {
		if compare(list[i-1], list[i]) >= 0 {
			return false
		}
	}
	return true
}
