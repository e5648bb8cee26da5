package target

import (
	"fmt"
	"strconv"
	"strings"
)

// Share is a share of targets in whole percent, from 1 to 100. The zero Share is
// off: no share is too large.
type Share uint8

// ParseShare reads a share such as "80%". "" and "off" are the zero Share.
func ParseShare(s string) (Share, error) {
	if s == "" || s == "off" {
		return 0, nil
	}
	digits, percent := strings.CutSuffix(s, "%")
	n, err := strconv.ParseUint(digits, 10, 8)
	if err != nil || !percent || n < 1 || n > 100 || digits[0] == '+' {
		return 0, fmt.Errorf("%q is no share of targets: write whole percent from 1%% to 100%%, or off", s)
	}
	return Share(n), nil
}

// UnmarshalText is [ParseShare] for flags and files.
func (s *Share) UnmarshalText(text []byte) error {
	parsed, err := ParseShare(string(text))
	if err != nil {
		return err
	}
	*s = parsed
	return nil
}

// String returns what [ParseShare] reads.
func (s Share) String() string {
	if s == 0 {
		return "off"
	}
	return strconv.Itoa(int(s)) + "%"
}

// exceeded tells whether part is more than this share of whole. All is always
// more: otherwise 100% could never be exceeded.
func (s Share) exceeded(part, whole int) bool {
	return s > 0 && part > 0 && (part >= whole || part*100 > int(s)*whole)
}
