package targetset

import (
	"errors"
	"fmt"
	"strings"
)

// maxName is how long the names of streams and targets may be, as in the trench file.
const maxName = 60

// CheckName says what is wrong with the name of a stream or target.
func CheckName(s string) error {
	switch {
	case s == "":
		return errors.New("has no name: write 1 to 60 characters out of A-Z a-z 0-9 _ . -")
	case len(s) > maxName, strings.ContainsFunc(s, func(r rune) bool {
		return (r < 'A' || r > 'Z') && (r < 'a' || r > 'z') && (r < '0' || r > '9') && r != '_' && r != '.' && r != '-'
	}):
		return fmt.Errorf("%s is not a name: write 1 to 60 characters out of A-Z a-z 0-9 _ . -", Quote(s))
	}
	return nil
}

// Quote quotes input, cut to a length that fits into a line.
func Quote(s string) string {
	const most = 120
	if len(s) > most {
		s = s[:most] + "…"
	}
	return fmt.Sprintf("%q", s)
}
