package translation

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"
)

// maxName is the most characters of a name in the trench file.
const maxName = 60

// hashLength is how many characters of a name that is shortened are its hash.
const hashLength = 16

// fileName returns the name in the trench file of something in Kubernetes. One that is too long, or
// has other characters than the file allows, ends with its hash.
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
