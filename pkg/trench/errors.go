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
	if p.Field == "" {
		return fmt.Sprintf("%s:%d: %s", p.File, p.Line, p.Message)
	}
	return fmt.Sprintf("%s:%d: %s: %s", p.File, p.Line, p.Field, p.Message)
}

// Errors is why a file was refused: at least one problem, in the order of the file, and at most
// 100.
type Errors struct {
	Problems []Problem
	// More is true when the file has further problems that are not listed.
	More bool
}

// Error returns one line a problem.
func (e *Errors) Error() string {
	var b strings.Builder
	for i, p := range e.Problems {
		if i > 0 {
			b.WriteByte('\n')
		}
		b.WriteString(p.String())
	}
	if e.More {
		fmt.Fprintf(&b, "\n%s: there are more problems than these %d", e.Problems[0].File, len(e.Problems))
	}
	return b.String()
}

func (e *Errors) sort() {
	slices.SortStableFunc(e.Problems, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
	})
}
