package logs

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// Line returns text as one line of valid UTF-8 of at most maxBytes. The text may be an error of an
// external system, and is written to logs, terminals and protobuf strings.
func Line(text string, maxBytes int) string {
	if isLine(text, maxBytes) {
		return text
	}
	text = strings.Map(func(char rune) rune {
		if !unicode.IsPrint(char) {
			return ' '
		}
		return char
	}, text[:min(len(text), maxBytes+utf8.UTFMax)])
	for len(text) > maxBytes {
		_, size := utf8.DecodeLastRuneInString(text)
		text = text[:len(text)-size]
	}
	return strings.TrimSpace(text)
}

// isLine reports whether text is printable ASCII that Line would not change, as most texts are.
func isLine(text string, maxBytes int) bool {
	if len(text) > maxBytes || strings.TrimSpace(text) != text {
		return false
	}
	for i := range len(text) {
		if text[i] < ' ' || text[i] > '~' {
			return false
		}
	}
	return true
}
