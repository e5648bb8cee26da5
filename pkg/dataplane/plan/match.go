package plan

import (
	"cmp"
	"slices"
)

// MatchPrefix begins the name of the set of the ports of a stream.
const MatchPrefix = "match/"

// MatchSet names the set of the ports of a stream that has a match.
func MatchSet(stream string) string { return MatchPrefix + stream }

// MaxMatch is the largest number of ports of a stream.
const MaxMatch = 100

// Numbers of protocols with ports (IANA).
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

// SameMatch compares the ports of two streams; a set without ports is not the same as no set.
func SameMatch(a, b []Port) bool { return (a == nil) == (b == nil) && slices.Equal(a, b) }

// MissingPorts returns the ports of want that have lacks; both are sorted.
func MissingPorts(have, want []Port) []Port {
	return slices.DeleteFunc(slices.Clone(want), func(p Port) bool {
		_, ok := slices.BinarySearchFunc(have, p, ComparePorts)
		return ok
	})
}
