package registry

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spiffe/go-spiffe/v2/spiffeid"

	"github.com/vipgate/vipgate/pkg/targetset"
)

// Patterns of SPIFFE IDs: anySegment stands for one whole segment of the path,
// anySegments, at the end only, for one or more.
const (
	anySegment  = "*"
	anySegments = "**"
	// maxPattern is what a SPIFFE ID may have at most (SPIFFE-ID, section 2.3).
	maxPattern = 2048
)

// IDPattern stands for the SPIFFE IDs of one trust domain whose path it matches.
// The zero IDPattern matches nothing.
type IDPattern struct {
	td       spiffeid.TrustDomain
	segments []string
}

// ParseIDPattern parses a pattern such as "spiffe://example.org/ns/*/sa/app": in
// the path * stands for one whole segment, and ** as the last one for one or more.
// The error tells the remedy.
func ParseIDPattern(s string) (IDPattern, error) {
	rest, ok := strings.CutPrefix(s, "spiffe://")
	switch {
	case !ok:
		return IDPattern{}, fmt.Errorf("%s is not a pattern of SPIFFE IDs: write one such as spiffe://example.org/ns/*/sa/app", targetset.Quote(s))
	case len(s) > maxPattern:
		return IDPattern{}, fmt.Errorf("the pattern %s has %d bytes, a SPIFFE ID has %d at most", targetset.Quote(s), len(s), maxPattern)
	}
	domain, path, hasPath := strings.Cut(rest, "/")
	td, err := spiffeid.TrustDomainFromString(domain)
	if err != nil || strings.Contains(domain, ":") {
		return IDPattern{}, fmt.Errorf("%s: %s is not a trust domain: write it in full and in lower case, such as example.org", targetset.Quote(s), targetset.Quote(domain))
	}
	if !hasPath || path == "" {
		return IDPattern{}, fmt.Errorf("%s has no path: for every member of the trust domain write spiffe://%s/**", targetset.Quote(s), td)
	}
	p := IDPattern{td: td, segments: strings.Split(path, "/")}
	for i, segment := range p.segments {
		last := i == len(p.segments)-1
		switch {
		case segment == anySegments && last, segment == anySegment:
		case segment == anySegments:
			return IDPattern{}, fmt.Errorf("%s: ** may only be the last segment, use * for one segment before it", targetset.Quote(s))
		case strings.Contains(segment, "*"):
			return IDPattern{}, fmt.Errorf("%s: %s has a * among other characters: * stands for a whole segment", targetset.Quote(s), targetset.Quote(segment))
		default:
			if err := spiffeid.ValidatePathSegment(segment); err != nil {
				return IDPattern{}, fmt.Errorf("%s: %s is not a segment of a path: %w", targetset.Quote(s), targetset.Quote(segment), err)
			}
		}
	}
	return p, nil
}

// String returns the pattern as it was written.
func (p IDPattern) String() string {
	if p.td.IsZero() {
		return ""
	}
	return "spiffe://" + p.td.String() + "/" + strings.Join(p.segments, "/")
}

// Matches reports whether the pattern stands for the ID.
func (p IDPattern) Matches(id spiffeid.ID) bool {
	if p.td.IsZero() || !id.MemberOf(p.td) {
		return false
	}
	rest, ok := strings.CutPrefix(id.Path(), "/")
	for i, want := range p.segments {
		if !ok {
			return false // the ID has fewer segments
		}
		if want == anySegments && i == len(p.segments)-1 {
			return true
		}
		var segment string
		segment, rest, ok = strings.Cut(rest, "/")
		if want != anySegment && want != segment {
			return false
		}
	}
	return !ok
}

// Allowance lets the SPIFFE IDs of a pattern register targets of one stream, or
// of all.
type Allowance struct {
	// Stream is the name of the stream; "" means all.
	Stream  string
	Pattern IDPattern
}

// ParseAllowance parses "STREAM=PATTERN", or "PATTERN" for all streams; see
// [ParseIDPattern].
func ParseAllowance(s string) (Allowance, error) {
	// No SPIFFE ID has an =.
	stream, pattern, named := strings.Cut(s, "=")
	if !named {
		stream, pattern = "", s
	} else if err := targetset.CheckName(stream); err != nil {
		return Allowance{}, fmt.Errorf("%s: the stream %w", targetset.Quote(s), err)
	}
	p, err := ParseIDPattern(pattern)
	if err != nil {
		return Allowance{}, err
	}
	return Allowance{Stream: stream, Pattern: p}, nil
}

// String returns the allowance as it was written.
func (a Allowance) String() string {
	if a.Stream == "" {
		return a.Pattern.String()
	}
	return a.Stream + "=" + a.Pattern.String()
}

// UnmarshalText implements encoding.TextUnmarshaler by [ParseAllowance].
func (a *Allowance) UnmarshalText(text []byte) error {
	parsed, err := ParseAllowance(string(text))
	if err == nil {
		*a = parsed
	}
	return err
}

// Allowances are several of them.
type Allowances []Allowance

// Authorizes reports whether the ID may register targets of any stream.
func (l Allowances) Authorizes(id spiffeid.ID) bool {
	return slices.ContainsFunc(l, func(a Allowance) bool { return a.Pattern.Matches(id) })
}

// Allows reports whether the ID may register targets of the stream.
func (l Allowances) Allows(id spiffeid.ID, stream string) bool {
	return slices.ContainsFunc(l, func(a Allowance) bool {
		return (a.Stream == "" || a.Stream == stream) && a.Pattern.Matches(id)
	})
}
