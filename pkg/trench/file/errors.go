package file

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// maxProblems limits the problems reported per file, and thus the work that a hostile file causes.
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
func (problem Problem) String() string {
	return fmt.Sprintf("%s:%d: %s%s", problem.File, problem.Line, strings.TrimPrefix(problem.Field+": ", ": "),
		problem.Message)
}

// Errors lists the problems of a rejected file in file order: at least one, at most 100.
type Errors struct {
	Problems []Problem
	// More is set if the file has further problems.
	More bool

	file string
}

// Error returns one line per problem.
func (errors *Errors) Error() string {
	lines := make([]string, len(errors.Problems))
	for nth, problem := range errors.Problems {
		lines[nth] = problem.String()
	}
	if errors.More {
		lines = append(lines, fmt.Sprintf("%s: there are more problems than these %d", errors.file, len(errors.Problems)))
	}
	return strings.Join(lines, "\n")
}

func (errors *Errors) add(line, column int, field, message string) {
	errors.Problems = append(errors.Problems, Problem{errors.file, max(line, 1), max(column, 1), field, message})
}

// err returns the first problems in file order, or nil if there are none.
func (errors *Errors) err() error {
	if len(errors.Problems) == 0 {
		return nil
	}
	slices.SortStableFunc(errors.Problems, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
	})
	// Truncate after sorting, so that the first problems of the file remain.
	if len(errors.Problems) > maxProblems {
		errors.Problems, errors.More = errors.Problems[:maxProblems], true
	}
	return errors
}
