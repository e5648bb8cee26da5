package plan

import (
	"cmp"
	"slices"
)

// matchPrefix is the name prefix of port sets.
const matchPrefix = "match/"

// MatchSet returns the name of the port set of a stream.
func MatchSet(stream string) string { return matchPrefix + stream }

// MaxMatch is the maximum number of ports of a stream.
const MaxMatch = 100

// IANA protocol numbers of transport protocols with ports.
const (
	TCP  uint8 = 6
	UDP  uint8 = 17
	SCTP uint8 = 132
)

// Port is a destination port of a transport protocol.
type Port struct {
	// Protocol is TCP, UDP or SCTP.
	Protocol uint8
	Number   uint16
}

// ComparePorts orders ports by protocol and number.
func ComparePorts(a, b Port) int {
	return cmp.Or(cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.Number, b.Number))
}

// SameMatch compares the ports of two streams. An empty set differs from a missing set (nil).
func SameMatch(a, b []Port) bool { return (a == nil) == (b == nil) && slices.Equal(a, b) }

// MissingPorts returns the ports of want that are not in have; both must be sorted.
func MissingPorts(have, want []Port) []Port {
	return slices.DeleteFunc(slices.Clone(want), func(p Port) bool {
		_, ok := slices.BinarySearchFunc(have, p, ComparePorts)
		return ok
	})
}
