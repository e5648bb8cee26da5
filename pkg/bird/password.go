package bird

import (
	"errors"
	"fmt"
	"strings"
)

// maxPassword is the longest TCP-MD5 key (RFC 2385, TCP_MD5SIG_MAXKEYLEN).
const maxPassword = 80

// ParsePassword returns the password in the content of a password file, without one trailing
// newline. BIRD 2.0.12 has no escapes in strings, so quotes and control characters are refused.
func ParsePassword(content []byte) (string, error) {
	s := strings.TrimSuffix(strings.TrimSuffix(string(content), "\n"), "\r")
	switch {
	case s == "":
		return "", errors.New("password is empty")
	case len(s) > maxPassword:
		return "", fmt.Errorf("password has %d bytes; TCP-MD5 takes at most %d", len(s), maxPassword)
	}
	for _, c := range []byte(s) {
		if c < 0x20 || c == 0x7f || c == '"' {
			return "", errors.New("password contains a quote or a control character, which BIRD cannot escape")
		}
	}
	return s, nil
}
