package translation

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"
)

// maxName is the maximum length of a name in the trench file.
const maxName = 60

// hashLength is the length of the hash in a shortened name.
const hashLength = 16

// fileName returns the name of a Kubernetes object in the trench file. A name that is too long,
// or has characters that the file does not allow, is changed and ends with a hash.
func fileName(s string) string {
	return shortened(s, maxName)
}

func shortened(s string, limit int) string {
	allowed := func(c rune) rune {
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', c == '.', c == '_', c == '-':
			return c
		}
		return '-'
	}
	clean := strings.Map(allowed, s)
	if s != "" && clean == s && len(s) <= limit {
		return s
	}
	hash := sha256.Sum256([]byte(s))
	return clean[:min(len(clean), limit-hashLength-1)] + "-" + hex.EncodeToString(hash[:])[:hashLength]
}
