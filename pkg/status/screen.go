package status

import (
	"fmt"
	"regexp"
	"strings"
	"unicode/utf8"
)

// Screen is a terminal. The zero Screen is no terminal and changes no text.
type Screen struct {
	// Width and Height are its size in characters; 0 for no limit.
	Width, Height int
	Colour        bool
}

// Control sequences of ECMA-48.
const (
	red, yellow, green, plain = "\x1b[31m", "\x1b[33m", "\x1b[32m", "\x1b[39m"
)

// colours maps the cells of tables that name a state.
var colours = func() map[string]string {
	all := map[string]string{}
	for colour, cells := range map[string]string{
		red:    "NO|DOWN|GONE|REFUSED|NOT REGISTERED|NOT LISTED YET|not ready|overdue|withdrawn",
		yellow: "!!|de-preferred|draining|drained|held|not reported|starting",
		green:  "ok|yes|up|ready|live|accepted|synced|serving",
	} {
		for cell := range strings.SplitSeq(cells, "|") {
			all[cell] = colour
		}
	}
	return all
}()

// warnings match lines that begin with a problem of the whole process.
var warnings = regexp.MustCompile(
	`^(STOPPING|GATING IS OFF|GOING AWAY|NOT |STALE|REFUSED|ALL STREAMS HELD|STREAM \S+ HELD)`)

// gap separates the cells of a line.
var gap = regexp.MustCompile(` {2,}`)

// Fit wraps the lines of a text to the width, with their last cell aligned, cuts the text to the
// height, and colours its states. The text has no control characters.
func (screen Screen) Fit(text string) string {
	var lines []string
	for line := range strings.Lines(text) {
		for _, part := range screen.wrap(strings.TrimSuffix(line, "\n")) {
			lines = append(lines, screen.paint(part))
		}
	}
	// The last line is for the cursor.
	if most := screen.Height - 1; most > 0 && len(lines) > most {
		lines = append(lines[:most-1], fmt.Sprintf("and %d more lines: `-o problems`, or name VIPs", len(lines)-most+1))
	}
	if len(lines) == 0 {
		return ""
	}
	return strings.Join(lines, "\n") + "\n"
}

// wrap splits a line at spaces into lines of the width. Their indent is the column of the last
// cell, unless too little is left.
func (screen Screen) wrap(line string) []string {
	if screen.Width <= 0 || utf8.RuneCountInString(line) <= screen.Width {
		return []string{line}
	}
	indent := 4
	if gaps := gap.FindAllStringIndex(line, -1); len(gaps) > 0 {
		if at := utf8.RuneCountInString(line[:gaps[len(gaps)-1][1]]); at <= screen.Width/2 {
			indent = at
		}
	}
	var lines []string
	rest := []rune(line)
	for len(rest) > screen.Width {
		cut := screen.Width
		for cut > indent && rest[cut] != ' ' {
			cut--
		}
		// A word may be longer than a line.
		if cut <= indent {
			cut = screen.Width
		}
		lines = append(lines, strings.TrimRight(string(rest[:cut]), " "))
		next := strings.TrimLeft(string(rest[cut:]), " ")
		rest = []rune(strings.Repeat(" ", min(indent, screen.Width/2)) + next)
	}
	return append(lines, string(rest))
}

func (screen Screen) paint(line string) string {
	if !screen.Colour {
		return line
	}
	if warnings.MatchString(line) {
		return red + line + plain
	}
	var out strings.Builder
	at := 0
	for _, between := range append(gap.FindAllStringIndex(line, -1), []int{len(line), len(line)}) {
		cell := line[at:between[0]]
		if colour := colours[cell]; colour != "" {
			cell = colour + cell + plain
		}
		out.WriteString(cell + line[between[0]:between[1]])
		at = between[1]
	}
	return out.String()
}
