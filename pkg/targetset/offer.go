package targetset

import (
	"errors"
	"net/netip"
	"strings"
	"time"
)

// ID names a target.
type ID struct{ Stream, Name string }

// String returns "STREAM/NAME".
func (i ID) String() string { return i.Stream + "/" + i.Name }

// Check returns why the names are invalid.
func (i ID) Check() error { return errors.Join(CheckName(i.Stream), CheckName(i.Name)) }

// MarshalText implements encoding.TextMarshaler.
func (i ID) MarshalText() ([]byte, error) { return []byte(i.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (i *ID) UnmarshalText(text []byte) error {
	i.Stream, i.Name, _ = strings.Cut(string(text), "/")
	return i.Check()
}

// Origin is a source of targets.
type Origin uint8

// The origins, in the order of precedence: if two disagree about a target, the earlier one counts.
const (
	OriginFile     Origin = iota // the trench file
	OriginRegistry               // the registry
	origins        int    = iota
)

// String returns "file" or "registry".
func (origin Origin) String() string { return [origins]string{"file", "registry"}[origin] }

// OriginSet is a set of origins.
type OriginSet uint8

// With returns the set with an origin added.
func (s OriginSet) With(o Origin) OriginSet { return s | 1<<o }

// Has reports whether the set contains an origin.
func (s OriginSet) Has(o Origin) bool { return s&(1<<o) != 0 }

// Names returns the names of the origins, in the order of precedence.
func (s OriginSet) Names() []string {
	var names []string
	for origin := range Origin(origins) {
		if s.Has(origin) {
			names = append(names, origin.String())
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
	// Leaving: the source no longer offers the target. It drains, unless another source offers it.
	Leaving
	// Terminating: the source announces the target's end. After its drain the target is removed for
	// as long as this offer remains, whatever other sources offer.
	Terminating
)

// Offer is one target of one stream as a source offers it. A target that a source no longer offers
// is removed immediately. To drain it, the source offers it as Leaving or Terminating at least
// until the drain ends, after which it is not a target any more.
type Offer struct {
	Name string
	// IPs are its addresses, one or two, at most one of a family.
	IPs       []netip.Addr
	Lifecycle Lifecycle
	// DrainEnd is the end of its drain, on the monotonic clock, unless it is Active.
	DrainEnd time.Time
	// Cause is the reason why it is not Active, such as "deregistered".
	Cause string
	// Owner is the SPIFFE ID that registered it; "" for the file.
	Owner string
}

// Offers maps each changed stream of a source to all its offers, in a stable order. An absent
// stream has not changed; an empty list means that the source offers nothing for the stream.
type Offers map[string][]Offer

// SourceGonePolicy decides on targets when the trench file is gone or their registration expired.
type SourceGonePolicy string

// The policies.
const (
	Hold  SourceGonePolicy = "hold"  // keeps the last offers
	Drain SourceGonePolicy = "drain" // drains the targets
	Drop  SourceGonePolicy = "drop"  // removes the targets immediately
)

// SourceState describes a source, for status.
type SourceState struct {
	Name     string    // of its Origin
	Live     bool      // the source can be read
	Since    time.Time // of Live
	Detail   string    // the offers or, when the source is gone, the reason
	OnGone   SourceGonePolicy
	Problems []string // the refused offers, each with its name and the reason
}
