package registry

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/spiffe/go-spiffe/v2/spiffeid"

	"github.com/vipgate/vipgate/pkg/targetset"
)

// maxPattern is the longest SPIFFE ID (SPIFFE-ID, section 2.3).
const maxPattern = 2048

// Allowance lets the SPIFFE IDs of a pattern register targets of one stream, or of all. The zero
// Allowance allows nothing.
type Allowance struct {
	Stream string // "" means all
	text   string
	domain spiffeid.TrustDomain
	path   *regexp.Regexp
}

// ParseAllowance parses "STREAM=PATTERN", or "PATTERN" for all streams. A pattern is such as
// "spiffe://example.org/ns/*/sa/app": in the path * stands for one whole segment, and ** as the
// last one for one or more. The error has the remedy.
func ParseAllowance(s string) (Allowance, error) {
	a, pattern := Allowance{text: s}, s
	if stream, rest, named := strings.Cut(s, "="); named { // no SPIFFE ID has a =
		if err := targetset.CheckName(stream); err != nil {
			return Allowance{}, fmt.Errorf("%s: the stream %w", targetset.Quote(s), err)
		}
		a.Stream, pattern = stream, rest
	}
	if err := a.parse(pattern); err != nil {
		return Allowance{}, err
	}
	return a, nil
}

func (a *Allowance) parse(pattern string) error {
	quoted := targetset.Quote(pattern)
	rest, ok := strings.CutPrefix(pattern, "spiffe://")
	switch {
	case !ok:
		return fmt.Errorf("%s is not a pattern of SPIFFE IDs: "+
			"write one such as spiffe://example.org/ns/*/sa/app", quoted)
	case len(pattern) > maxPattern:
		return fmt.Errorf("the pattern %s has %d bytes, a SPIFFE ID has %d at most", quoted, len(pattern), maxPattern)
	}
	name, path, _ := strings.Cut(rest, "/")
	var err error
	switch a.domain, err = spiffeid.TrustDomainFromString(name); {
	case err != nil, strings.Contains(name, ":"):
		return fmt.Errorf("%s: %s is not a trust domain: "+
			"write it in full and in lower case, such as example.org", quoted, targetset.Quote(name))
	case path == "":
		return fmt.Errorf("%s has no path: for every member of the trust domain write spiffe://%s/**", quoted, name)
	}
	segments, expression := strings.Split(path, "/"), ""
	for i, segment := range segments {
		err := spiffeid.ValidatePathSegment(segment)
		switch {
		case segment == "*":
			expression += "/[^/]+"
		case segment == "**" && i == len(segments)-1:
			expression += "/.+"
		case segment == "**":
			return fmt.Errorf("%s: ** may only be the last segment, use * for one segment before it", quoted)
		case strings.Contains(segment, "*"):
			return fmt.Errorf("%s: %s has a * among other characters: "+
				"* stands for a whole segment", quoted, targetset.Quote(segment))
		case err != nil:
			return fmt.Errorf("%s: %s is not a segment of a path: %w", quoted, targetset.Quote(segment), err)
		default:
			expression += "/" + regexp.QuoteMeta(segment)
		}
	}
	a.path = regexp.MustCompile(`\A` + expression + `\z`)
	return nil
}

// String returns the allowance as it was written.
func (a Allowance) String() string { return a.text }

// UnmarshalText implements encoding.TextUnmarshaler by [ParseAllowance].
func (a *Allowance) UnmarshalText(text []byte) (err error) {
	*a, err = ParseAllowance(string(text))
	return err
}

func (a Allowance) matches(id spiffeid.ID) bool {
	return a.path != nil && id.MemberOf(a.domain) && a.path.MatchString(id.Path())
}

// Allowances are several of them.
type Allowances []Allowance

// Authorizes reports whether the ID may register targets of any stream.
func (l Allowances) Authorizes(id spiffeid.ID) bool {
	return slices.ContainsFunc(l, func(a Allowance) bool { return a.matches(id) })
}

// Allows reports whether the ID may register targets of the stream.
func (l Allowances) Allows(id spiffeid.ID, stream string) bool {
	return slices.ContainsFunc(l, func(a Allowance) bool {
		return (a.Stream == "" || a.Stream == stream) && a.matches(id)
	})
}
