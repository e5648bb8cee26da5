package outage

import (
	"fmt"
	"strconv"
	"strings"
)

// Percent is a part of all targets, from 1 to 100 %. The zero Percent is off: it is
// never exceeded.
type Percent uint8

// ParsePercent reads text such as "80%". "" and "off" are the zero Percent.
func ParsePercent(s string) (Percent, error) {
	if s == "" || s == "off" {
		return 0, nil
	}
	digits, percent := strings.CutSuffix(s, "%")
	n, err := strconv.ParseUint(digits, 10, 8)
	if err != nil || !percent || n < 1 || n > 100 || digits[0] == '+' {
		return 0, fmt.Errorf("%q is not a percentage of targets; use whole percent from 1%% to 100%%, or off", s)
	}
	return Percent(n), nil
}

// UnmarshalText is [ParsePercent] for flags and files.
func (s *Percent) UnmarshalText(text []byte) error {
	parsed, err := ParsePercent(string(text))
	if err != nil {
		return err
	}
	*s = parsed
	return nil
}

// String returns what [ParsePercent] reads.
func (s Percent) String() string {
	if s == 0 {
		return "off"
	}
	return strconv.Itoa(int(s)) + "%"
}

// exceeded reports whether part is more than this percentage of whole. All is always
// more: otherwise 100% could never be exceeded.
func (s Percent) exceeded(part, whole int) bool {
	return s > 0 && part > 0 && (part >= whole || part*100 > int(s)*whole)
}
