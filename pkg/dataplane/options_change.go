package dataplane

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"
)

// shape are the options that what is in the kernel looks different by. They are kept
// beside the records: at a start with others, what is there is ours and made anew, and
// not taken for somebody else's work.
type shape struct {
	Mask      uint32
	Priority  int
	Stateless bool
}

func (o Options) shape() shape {
	return shape{Mask: o.Mask, Priority: o.Priority, Stateless: o.Stateless}
}

// as are the options with another shape.
func (o Options) as(s shape) Options {
	o.Mask, o.Priority, o.Stateless = s.Mask, s.Priority, s.Stateless
	return o
}

func (o Options) shapeFile() string { return filepath.Join(o.StateDir, "dataplane.options") }

// lastShape returns what the kernel was last written with; the shape of o if nobody
// knows.
func (o Options) lastShape() shape {
	var s shape
	b, err := os.ReadFile(o.shapeFile())
	if err != nil || json.Unmarshal(b, &s) != nil || o.as(s).Validate() != nil || s.Mask == 0 || s.Priority == 0 {
		return o.shape()
	}
	return s
}

// keepShape writes down what the kernel was written with.
func (o Options) keepShape() error {
	b, err := json.Marshal(o.shape())
	if err != nil {
		return err
	}
	if old, err := os.ReadFile(o.shapeFile()); err == nil && string(old) == string(b) {
		return nil
	}
	name := o.shapeFile() + ".new"
	if err := os.WriteFile(name, b, 0o600); err != nil {
		return err
	}
	return os.Rename(name, o.shapeFile())
}

// forgetShape removes what keepShape wrote.
func (o Options) forgetShape() error {
	if err := os.Remove(o.shapeFile()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// leave removes the policy rules that were made with another shape, once those of this
// one are there.
func (f *fabric) leave(old shape) error {
	was := *f
	was.o = f.o.as(old)
	ours := func(f *fabric, r policyRule) bool {
		return slices.Contains(f.commonRules(r.family), r) || r == f.targetPolicy(r.family, r.table)
	}
	var a asks
	for _, family := range f.families() {
		var list []policyRule
		if err := f.listPolicy(family, func(r policyRule) {
			if ours(&was, r) && !ours(f, r) {
				list = append(list, r)
			}
		}); err != nil {
			return err
		}
		// The one that jumps first: it must not lead nowhere.
		slices.SortStableFunc(list, func(a, b policyRule) int { return int(a.priority) - int(b.priority) })
		for _, r := range list {
			a.policyRule(unix.RTM_DELRULE, 0, r)
			a.note(0, unix.ENOENT, fmt.Sprintf("delete %s policy rule of priority %d", family, r.priority), netip.Addr{})
		}
	}
	return f.do(&a)[0]
}
