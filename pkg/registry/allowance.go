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

// IDPattern is a pattern of the SPIFFE IDs of one trust domain. The zero IDPattern matches nothing.
type IDPattern struct {
	text   string
	domain spiffeid.TrustDomain
	path   *regexp.Regexp
}

// ParseIDPattern parses a pattern such as "spiffe://example.org/ns/*/sa/app": in the path * stands for
// one whole segment, and ** as the last one for one or more. The error has the remedy.
func ParseIDPattern(s string) (IDPattern, error) {
	quoted := targetset.Quote(s)
	rest, ok := strings.CutPrefix(s, "spiffe://")
	switch {
	case !ok:
		return IDPattern{}, fmt.Errorf("%s is not a pattern of SPIFFE IDs: "+
			"write one such as spiffe://example.org/ns/*/sa/app", quoted)
	case len(s) > maxPattern:
		return IDPattern{}, fmt.Errorf("the pattern %s has %d bytes, a SPIFFE ID has %d at most", quoted, len(s), maxPattern)
	}
	name, path, _ := strings.Cut(rest, "/")
	domain, err := spiffeid.TrustDomainFromString(name)
	switch {
	case err != nil, strings.Contains(name, ":"):
		return IDPattern{}, fmt.Errorf("%s: %s is not a trust domain: "+
			"write it in full and in lower case, such as example.org", quoted, targetset.Quote(name))
	case path == "":
		return IDPattern{}, fmt.Errorf("%s has no path: "+
			"for every member of the trust domain write spiffe://%s/**", quoted, domain)
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
			return IDPattern{}, fmt.Errorf("%s: ** may only be the last segment, use * for one segment before it", quoted)
		case strings.Contains(segment, "*"):
			return IDPattern{}, fmt.Errorf("%s: %s has a * among other characters: "+
				"* stands for a whole segment", quoted, targetset.Quote(segment))
		case err != nil:
			return IDPattern{}, fmt.Errorf("%s: %s is not a segment of a path: %w", quoted, targetset.Quote(segment), err)
		default:
			expression += "/" + regexp.QuoteMeta(segment)
		}
	}
	return IDPattern{s, domain, regexp.MustCompile(`\A` + expression + `\z`)}, nil
}

// String returns the pattern as it was written.
func (p IDPattern) String() string { return p.text }

// Matches reports whether the ID matches the pattern.
func (p IDPattern) Matches(id spiffeid.ID) bool {
	return p.path != nil && id.MemberOf(p.domain) && p.path.MatchString(id.Path())
}

// Allowance lets the SPIFFE IDs of a pattern register targets of one stream, or of all.
type Allowance struct {
	// Stream is the name of the stream; "" means all.
	Stream  string
	Pattern IDPattern
}

// ParseAllowance parses "STREAM=PATTERN", or "PATTERN" for all streams; see [ParseIDPattern].
func ParseAllowance(s string) (a Allowance, err error) {
	pattern := s
	if stream, rest, named := strings.Cut(s, "="); named { // no SPIFFE ID has a =
		if err := targetset.CheckName(stream); err != nil {
			return Allowance{}, fmt.Errorf("%s: the stream %w", targetset.Quote(s), err)
		}
		a.Stream, pattern = stream, rest
	}
	a.Pattern, err = ParseIDPattern(pattern)
	return a, err
}

// String returns the allowance as it was written.
func (a Allowance) String() string {
	if a.Stream == "" {
		return a.Pattern.String()
	}
	return a.Stream + "=" + a.Pattern.String()
}

// UnmarshalText implements encoding.TextUnmarshaler by [ParseAllowance].
func (a *Allowance) UnmarshalText(text []byte) (err error) {
	*a, err = ParseAllowance(string(text))
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
