package trench

import (
	"errors"
	"fmt"
	"regexp"
	"regexp/syntax"
	"strconv"
	"strings"
	"unicode/utf8"
)

// The limits of a regular expression: RE2 matches in linear time, but 1000 characters may have a
// million instructions and take a second to parse.
const (
	// maxParts is the maximum of partsOf: an expression and its match then take less than 1 MB.
	maxParts = 2000
	// maxTables is the maximum number of Unicode classes, each with up to 1 500 characters and ranges.
	maxTables = 20
	// maxFolded is the maximum number of characters in ranges of an expression that ignores case: the
	// parser looks at each of them.
	maxFolded = 1 << 16
)

// checkBody rejects an invalid regular expression, and one that takes much memory or time to parse,
// compile or match. The field remains a string to keep checks comparable.
func checkBody(expression string) Problem {
	// Limits of the text, which parsing needs, come first.
	if tables := strings.Count(strings.ToLower(expression), `\p`); tables > maxTables {
		return newProblem(fmt.Sprintf(`has %d classes such as \pL`, tables), fmt.Sprintf("write %d at most", maxTables))
	}
	if folded := foldedIn(expression); folded > maxFolded {
		return newProblem(fmt.Sprintf("has ranges of %d characters and (?i)", folded),
			fmt.Sprintf("write ranges of %d at most, or remove (?i)", maxFolded))
	}
	parsed, err := syntax.Parse(expression, syntax.Perl)
	if invalid := (*syntax.Error)(nil); errors.As(err, &invalid) {
		return newProblem(fmt.Sprintf("is %s, no regular expression (RE2): %s at %s", Quote(expression), invalid.Code,
			Quote(invalid.Expr)), "change it, or write \\Q before text that is meant literally")
	}
	if parts := partsOf(parsed); parts > maxParts {
		return newProblem(fmt.Sprintf("is %s, of %d parts with all repeats written out", Quote(expression), parts),
			fmt.Sprintf("write %d at most, such as .* in place of .{0,1000}", maxParts))
	}
	return Problem{}
}

var ignoresCase = regexp.MustCompile(`\(\?[a-zA-Z]*i`)

// foldedIn bounds the characters in the ranges of an expression that ignores case. Each - may be
// within a range.
func foldedIn(expression string) (characters int) {
	if !ignoresCase.MatchString(expression) {
		return 0
	}
	for at, sign := range expression {
		if sign != '-' || at+1 == len(expression) {
			continue
		}
		first, _ := utf8.DecodeLastRuneInString(expression[:at])
		last, _ := utf8.DecodeRuneInString(expression[at+1:])
		switch digits, isCode := strings.CutPrefix(expression[at+1:], `\x{`); {
		case isCode:
			digits, _, _ = strings.Cut(digits, "}")
			code, err := strconv.ParseUint(digits, 16, 21)
			if last = rune(code); err != nil {
				last = utf8.MaxRune
			}
		case last == '\\':
			last = 0o777 // the largest character with another escape
		}
		if first < utf8.RuneSelf { // it may be the end of an escape
			first = 0
		}
		characters += int(max(0, last-first))
	}
	return characters
}

// partsOf returns the size of a regular expression: the number of instructions of its program and a
// tenth of the bounds of their ranges. A group counts more, because each thread of a match has room
// for what it captures.
func partsOf(expression *syntax.Regexp) int {
	parts := 1
	switch expression.Op {
	case syntax.OpLiteral:
		parts = len(expression.Rune)
	case syntax.OpCharClass:
		parts += len(expression.Rune) / 10
	case syntax.OpAlternate:
		parts = len(expression.Sub)
	case syntax.OpCapture:
		parts = 20
	case syntax.OpStar:
		parts = 2
	}
	for _, sub := range expression.Sub {
		parts += partsOf(sub)
	}
	if expression.Op == syntax.OpRepeat {
		parts *= max(expression.Min, expression.Max, 1) // Max is -1 for no limit
	}
	return parts
}

// CompileBody compiles the valid expression of a check. It returns the number of bytes that are
// matched, too, which bounds the time of a match: 64 KiB with 100 parts, down to 4 KiB.
func CompileBody(expression string) (compiled *regexp.Regexp, limit int) {
	const most, least, parts = 64 << 10, 4 << 10, 100
	compiled = regexp.MustCompile(expression)
	parsed, err := syntax.Parse(expression, syntax.Perl)
	if err != nil {
		return compiled, least
	}
	return compiled, min(most, max(least, most*parts/partsOf(parsed)))
}
