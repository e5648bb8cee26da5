package registry

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/spiffe/go-spiffe/v2/spiffeid"

	"github.com/vipgate/vipgate/pkg/targetset"
)

// maxPattern is the maximum length of a SPIFFE ID in bytes (SPIFFE-ID, section 2.3).
const maxPattern = 2048

// Allowance authorizes the SPIFFE IDs that match a pattern to register targets of one stream, or of
// all streams. The zero Allowance authorizes no ID.
type Allowance struct {
	Stream string // "": all streams
	text   string
	domain spiffeid.TrustDomain
	path   *regexp.Regexp
}

// ParseAllowance parses "STREAM=PATTERN", or "PATTERN" for all streams. An example of a pattern is
// "spiffe://example.org/ns/*/sa/app": in the path, * matches one whole segment, and ** as the last
// segment matches one or more. The error includes the remedy.
func ParseAllowance(text string) (Allowance, error) {
	allowance, pattern := Allowance{text: text}, text
	if stream, rest, named := strings.Cut(text, "="); named { // a SPIFFE ID never contains =
		if err := targetset.CheckName(stream); err != nil {
			return Allowance{}, fmt.Errorf("%s: the stream %w", targetset.Quote(text), err)
		}
		allowance.Stream, pattern = stream, rest
	}
	if err := allowance.parse(pattern); err != nil {
		return Allowance{}, err
	}
	return allowance, nil
}

func (allowance *Allowance) parse(pattern string) error {
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
	switch allowance.domain, err = spiffeid.TrustDomainFromString(name); {
	case err != nil, strings.Contains(name, ":"):
		return fmt.Errorf("%s: %s is not a trust domain: "+
			"write it in full and in lower case, such as example.org", quoted, targetset.Quote(name))
	// An ID without a path names the trust domain, not a workload.
	case path == "":
		return fmt.Errorf("%s has no path: for every member of the trust domain write spiffe://%s/**", quoted, name)
	}
	segments, expression := strings.Split(path, "/"), ""
	for index, segment := range segments {
		err := spiffeid.ValidatePathSegment(segment)
		switch {
		case segment == "*":
			expression += "/[^/]+"
		case segment == "**" && index == len(segments)-1:
			expression += "/.+"
		case segment == "**":
			return fmt.Errorf("%s: ** may only be the last segment, use * for one segment before it", quoted)
		// Without this a partial wildcard would match literally, which no operator expects.
		case strings.Contains(segment, "*"):
			return fmt.Errorf("%s: %s has a * among other characters: "+
				"* stands for a whole segment", quoted, targetset.Quote(segment))
		case err != nil:
			return fmt.Errorf("%s: %s is not a segment of a path: %w", quoted, targetset.Quote(segment), err)
		// Quote the dot, which a segment may contain and which matches any character.
		default:
			expression += "/" + regexp.QuoteMeta(segment)
		}
	}
	allowance.path = regexp.MustCompile(`\A` + expression + `\z`)
	return nil
}

// String returns the allowance as it was written.
func (allowance Allowance) String() string { return allowance.text }

// UnmarshalText implements encoding.TextUnmarshaler by [ParseAllowance].
func (allowance *Allowance) UnmarshalText(text []byte) (err error) {
	*allowance, err = ParseAllowance(string(text))
	return err
}

func (allowance Allowance) matches(id spiffeid.ID) bool {
	return allowance.path != nil && id.MemberOf(allowance.domain) && allowance.path.MatchString(id.Path())
}

// Allowances is a list of alternatives: one matching Allowance is sufficient.
type Allowances []Allowance

// Authorizes reports whether the ID may register targets of any stream.
func (allowances Allowances) Authorizes(id spiffeid.ID) bool {
	return slices.ContainsFunc(allowances, func(allowance Allowance) bool { return allowance.matches(id) })
}

// Allows reports whether the ID may register targets of the stream.
func (allowances Allowances) Allows(id spiffeid.ID, stream string) bool {
	return slices.ContainsFunc(allowances, func(allowance Allowance) bool {
		return (allowance.Stream == "" || allowance.Stream == stream) && allowance.matches(id)
	})
}
