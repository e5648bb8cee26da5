// Command names prints the limits of names and comments per folder: the mean length of declared
// identifiers, the share of identifiers with at most two letters, and the comment lines per 100
// lines of function bodies.
//
// Usage: go run ./test/style/names [FOLDER...]     (default: pkg cmd)
package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"unicode/utf8"
)

func main() {
	folders := os.Args[1:]
	if len(folders) == 0 {
		folders = []string{"pkg", "cmd"}
	}
	if err := run(folders); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(folders []string) error {
	counts, err := measure(folders)
	if err != nil {
		return err
	}
	var total count
	fmt.Println("letters  short  comments  folder")
	for _, folder := range slices.Sorted(maps.Keys(counts)) {
		fmt.Println(counts[folder], folder)
		total.add(counts[folder])
	}
	fmt.Println(total, "total")
	return nil
}

// count holds the sums of a folder.
type count struct {
	identifiers, letters int
	short                int // identifiers with at most two letters
	lines, comments      int // of function bodies
}

func (c *count) add(other count) {
	c.identifiers += other.identifiers
	c.letters += other.letters
	c.short += other.short
	c.lines += other.lines
	c.comments += other.comments
}

// mean returns the mean length of identifiers in letters.
func (c count) mean() float64 { return float64(c.letters) / max(1, float64(c.identifiers)) }

// shortShare returns the percentage of identifiers with at most two letters.
func (c count) shortShare() float64 { return 100 * float64(c.short) / max(1, float64(c.identifiers)) }

// density returns the comment lines per 100 lines of function bodies.
func (c count) density() float64 { return 100 * float64(c.comments) / max(1, float64(c.lines)) }

// String formats the three numbers.
func (c count) String() string {
	return fmt.Sprintf("%7.2f  %4.1f%%  %8.2f ", c.mean(), c.shortShare(), c.density())
}

// measure counts the handwritten product code below folders, by folder.
func measure(folders []string) (map[string]count, error) {
	counts := map[string]count{}
	for _, folder := range folders {
		err := filepath.WalkDir(folder, func(path string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			fileSet := token.NewFileSet()
			file, err := parser.ParseFile(fileSet, path, nil, parser.ParseComments)
			if err != nil || ast.IsGenerated(file) {
				return err
			}
			sum := counts[filepath.Dir(path)]
			sum.add(measureFile(fileSet, file))
			counts[filepath.Dir(path)] = sum
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return counts, nil
}

func measureFile(fileSet *token.FileSet, file *ast.File) (sum count) {
	declare := func(names ...*ast.Ident) {
		for _, name := range names {
			if name == nil || name.Name == "_" {
				continue
			}
			length := utf8.RuneCountInString(name.Name)
			sum.identifiers++
			sum.letters += length
			if length <= 2 {
				sum.short++
			}
		}
	}
	line := func(position token.Pos) int { return fileSet.Position(position).Line }
	ast.Inspect(file, func(node ast.Node) bool {
		switch node := node.(type) {
		case *ast.FuncDecl:
			declare(node.Name)
			if node.Body == nil {
				break
			}
			sum.lines += line(node.Body.End()) - line(node.Body.Pos()) + 1
			for _, group := range file.Comments {
				if group.Pos() > node.Body.Pos() && group.End() < node.Body.End() {
					sum.comments += line(group.End()) - line(group.Pos()) + 1
				}
			}
		case *ast.Field: // parameters, results, receivers, struct fields, interface methods
			declare(node.Names...)
		case *ast.TypeSpec:
			declare(node.Name)
		case *ast.ValueSpec:
			declare(node.Names...)
		case *ast.AssignStmt:
			if node.Tok == token.DEFINE {
				declareExpressions(declare, node.Lhs...)
			}
		case *ast.RangeStmt:
			if node.Tok == token.DEFINE {
				declareExpressions(declare, node.Key, node.Value)
			}
		}
		return true
	})
	return sum
}

func declareExpressions(declare func(...*ast.Ident), list ...ast.Expr) {
	for _, expression := range list {
		if name, ok := expression.(*ast.Ident); ok {
			declare(name)
		}
	}
}
