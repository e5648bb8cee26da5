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
func fileName(name string) string { return shortened(name, maxName) }

func shortened(name string, limit int) string {
	allowed := func(character rune) rune {
		switch {
		case character >= 'a' && character <= 'z', character >= 'A' && character <= 'Z', character >= '0' &&
			character <= '9', character == '.', character == '_', character == '-':
			return character
		}
		return '-'
	}
	clean := strings.Map(allowed, name)
	if name != "" && clean == name && len(name) <= limit {
		return name
	}
	hash := sha256.Sum256([]byte(name))
	return clean[:min(len(clean), limit-hashLength-1)] + "-" + hex.EncodeToString(hash[:])[:hashLength]
}
