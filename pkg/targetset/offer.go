package targetset

import (
	"cmp"
	"errors"
	"net/netip"
	"time"
)

// ID names a target.
type ID struct {
	Stream string `json:"stream"`
	Name   string `json:"name"`
}

// String returns "STREAM/NAME".
func (i ID) String() string { return i.Stream + "/" + i.Name }

// Check returns what is wrong with the names.
func (i ID) Check() error { return errors.Join(CheckName(i.Stream), CheckName(i.Name)) }

func (i ID) compare(j ID) int {
	return cmp.Or(cmp.Compare(i.Stream, j.Stream), cmp.Compare(i.Name, j.Name))
}

// Origin is a source of targets.
type Origin uint8

// The origins, in the order of precedence: where two disagree about a target, the earlier one
// counts.
const (
	OriginFile     Origin = iota // the trench file
	OriginRegistry               // the registry
	origins        int    = iota
)

// String returns "file" or "registry".
func (o Origin) String() string { return [origins]string{"file", "registry"}[o] }

// OriginSet is a set of origins.
type OriginSet uint8

// With returns the set with o in it.
func (s OriginSet) With(o Origin) OriginSet { return s | 1<<o }

// Has reports whether o is in the set.
func (s OriginSet) Has(o Origin) bool { return s&(1<<o) != 0 }

// Names returns the names of the origins, in the order of precedence.
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
	// Leaving: the source no longer offers the target. It drains, unless another source offers it.
	Leaving
	// Terminating: the source announces the target's end. After its drain it is over for as long as
	// it is offered so, whatever other sources offer.
	Terminating
)

// Offer is one target of one stream as a source offers it. A target that a source no longer names
// is gone at once; for a gentle end it is offered as Leaving or Terminating until its drain ends,
// or longer: what has drained is no target.
type Offer struct {
	Name string
	// IPs are its addresses, one or two, at most one of a family.
	IPs       []netip.Addr
	Lifecycle Lifecycle
	// DrainEnd is when it leaves, on the monotonic clock, unless it is Active.
	DrainEnd time.Time
	// Cause is why it is not Active, such as "deregistered".
	Cause string
	// Owner is the SPIFFE ID that registered it; "" for the file.
	Owner string
}

// Offers is what changed in a source: by stream all that it offers, in a stable order. An absent
// stream has not changed; one with an empty list has nothing any more.
type Offers map[string][]Offer

// SourceGonePolicy is what happens to targets when the trench file is gone or their registration
// has expired.
type SourceGonePolicy string

// The policies.
const (
	Hold  SourceGonePolicy = "hold"  // keeps what the source offered last
	Drain SourceGonePolicy = "drain" // drains it
	Drop  SourceGonePolicy = "drop"  // removes it at once
)

// SourceState describes a source, for status.
type SourceState struct {
	Name     string    // of its Origin
	Live     bool      // it can be read
	Since    time.Time // of Live
	Detail   string    // what it offers or, when it is gone, why
	OnGone   SourceGonePolicy
	Problems []string // the offers that are not taken: each with its name and why
}
