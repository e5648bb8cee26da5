package trench

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// maxProblems bounds the problems reported for one file, and with it the work that a hostile file
// can cause.
const maxProblems = 100

// Problem is one thing in the file that must be changed.
type Problem struct {
	// File is the name that was given to Parse.
	File string
	// Line and Column count from 1.
	Line, Column int
	// Field is the path of the field, such as "attractor.gateways[0].address"; "" when the problem
	// is the whole file.
	Field string
	// Message says the problem and how to fix it.
	Message string
}

// String returns "file:line: field: message".
func (p Problem) String() string {
	return fmt.Sprintf("%s:%d: %s%s", p.File, p.Line, strings.TrimPrefix(p.Field+": ", ": "), p.Message)
}

// Errors is why a file was refused: at least one problem, in the order of the file, and at most
// 100.
type Errors struct {
	Problems []Problem
	// More is true when the file has further problems that are not listed.
	More bool

	file string
}

// Error returns one line a problem.
func (e *Errors) Error() string {
	lines := make([]string, len(e.Problems))
	for i, p := range e.Problems {
		lines[i] = p.String()
	}
	if e.More {
		lines = append(lines, fmt.Sprintf("%s: there are more problems than these %d", e.file, len(e.Problems)))
	}
	return strings.Join(lines, "\n")
}

// add records a problem. Beyond maxProblems only the fact is kept.
func (e *Errors) add(line, column int, field, format string, args ...any) {
	if e.full() {
		e.More = true
		return
	}
	e.Problems = append(e.Problems, Problem{e.file, max(line, 1), max(column, 1), field, fmt.Sprintf(format, args...)})
}

func (e *Errors) full() bool { return len(e.Problems) >= maxProblems }

// err returns the problems as an error, or nil when there are none.
func (e *Errors) err() error {
	if len(e.Problems) == 0 {
		return nil
	}
	slices.SortStableFunc(e.Problems, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
	})
	return e
}
