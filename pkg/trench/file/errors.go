package file

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// maxProblems limits the problems reported per file, and thus the work that a hostile file
// causes.
const maxProblems = 100

// Problem describes one error in a file.
type Problem struct {
	// File is the name passed to [Parse].
	File string
	// Line and Column start at 1.
	Line, Column int
	// Field is the path of the field, such as "attractor.gateways[0].address"; "" if the problem
	// concerns the whole file.
	Field string
	// Message describes the problem and its remedy.
	Message string
}

// String returns "file:line: field: message".
func (p Problem) String() string {
	return fmt.Sprintf("%s:%d: %s%s", p.File, p.Line, strings.TrimPrefix(p.Field+": ", ": "), p.Message)
}

// Errors lists the problems of a rejected file in file order: at least one, at most 100.
type Errors struct {
	Problems []Problem
	// More is set if the file has further problems.
	More bool

	file string
}

// Error returns one line per problem.
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

// add records a problem.
func (e *Errors) add(line, column int, field, message string) {
	e.Problems = append(e.Problems, Problem{e.file, max(line, 1), max(column, 1), field, message})
}

// err returns the first problems in file order, or nil if there are none.
func (e *Errors) err() error {
	if len(e.Problems) == 0 {
		return nil
	}
	slices.SortStableFunc(e.Problems, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
	})
	if len(e.Problems) > maxProblems {
		e.Problems, e.More = e.Problems[:maxProblems], true
	}
	return e
}
