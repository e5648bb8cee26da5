package targetset

import (
	"net/netip"
	"strconv"
	"time"
)

// Origin is a source of targets.
type Origin uint8

// The origins, in the order of precedence: where two disagree about a target, the
// earlier one counts.
const (
	// OriginFile is the trench file.
	OriginFile Origin = iota
	// OriginRegistry is the registry.
	OriginRegistry
	origins int = iota
)

// String returns "file" or "registry".
func (o Origin) String() string {
	switch o {
	case OriginFile:
		return "file"
	case OriginRegistry:
		return "registry"
	}
	return "Origin(" + strconv.Itoa(int(o)) + ")"
}

// OriginSet is a set of origins.
type OriginSet uint8

// With returns the set with o in it.
func (s OriginSet) With(o Origin) OriginSet { return s | 1<<o }

// Has reports whether o is in the set.
func (s OriginSet) Has(o Origin) bool { return s&(1<<o) != 0 }

// Names returns the origins in words, in the order of precedence.
func (s OriginSet) Names() []string {
	var names []string
	for o := range Origin(origins) {
		if s.Has(o) {
			names = append(names, o.String())
		}
	}
	return names
}

// Lifecycle is the state of a target in its source.
type Lifecycle uint8

// The lifecycle states.
const (
	// Active: no end is known.
	Active Lifecycle = iota
	// Leaving: the source no longer offers it. It drains, unless another source
	// offers it still.
	Leaving
	// Terminating: the source announces its end. It drains, and is over after that
	// for as long as it is offered so, whatever others say.
	Terminating
)

// Offer is one target of one stream as a source offers it. A target that a source
// no longer names at all is gone at once; a gentle end is offered as Leaving or
// Terminating for as long as it drains.
type Offer struct {
	Name string
	// IPs are its addresses, one or two, at most one of a family.
	IPs       []netip.Addr
	Lifecycle Lifecycle
	// DrainEnd is when it leaves, on the monotonic clock, unless it is Active.
	DrainEnd time.Time
	// Cause says in words why it is not Active, such as "deregistered".
	Cause string
	// Owner is who offers it, such as a SPIFFE ID; "" for the file.
	Owner string
}

// Offers is what changed in a source: by stream all that it offers, in a stable
// order. A stream that is absent has not changed; one with an empty list has
// nothing any more.
type Offers map[string][]Offer

// GonePolicy is what happens to the targets of a source that is gone.
type GonePolicy uint8

// The answers.
const (
	// Hold keeps what the source offered last.
	Hold GonePolicy = iota
	// Drain has it drain and leave.
	Drain
	// Drop lets it go at once.
	Drop
)

// String returns "hold", "drain" or "drop".
func (g GonePolicy) String() string {
	switch g {
	case Hold:
		return "hold"
	case Drain:
		return "drain"
	case Drop:
		return "drop"
	}
	return "Gone(" + strconv.Itoa(int(g)) + ")"
}

// SourceState describes a source, for people.
type SourceState struct {
	// Name is "file", "registry" or "directory".
	Name string
	// Live is true while the source can be asked.
	Live bool
	// Since is when Live last changed.
	Since time.Time
	// Detail is what it offers or, when it is gone, why.
	Detail string
	OnGone GonePolicy
	// Problems are what it offers and is not taken: each with its name and why.
	Problems []string
}

// ID names a target.
type ID struct{ Stream, Name string }

// String returns "STREAM/NAME".
func (i ID) String() string { return i.Stream + "/" + i.Name }
