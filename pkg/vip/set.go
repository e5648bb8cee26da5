package vip

import (
	"maps"
	"slices"
)

// Set is a set of VIPs. The nil Set is empty and can be read.
type Set map[VIP]struct{}

// NewSet returns the set of the given VIPs.
func NewSet(vips ...VIP) Set {
	s := make(Set, len(vips))
	for _, v := range vips {
		s[v] = struct{}{}
	}
	return s
}

// Has reports whether v is in the set.
func (s Set) Has(v VIP) bool {
	_, ok := s[v]
	return ok
}

// Equal reports whether both sets have the same VIPs.
func (s Set) Equal(t Set) bool { return maps.Equal(s, t) }

// Sorted returns the VIPs in the order of [Compare].
func (s Set) Sorted() []VIP { return slices.SortedFunc(maps.Keys(s), Compare) }
