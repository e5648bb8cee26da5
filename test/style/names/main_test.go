package main

import (
	"fmt"
	"go/parser"
	"go/token"
	"testing"

	"github.com/vipgate/vipgate/test/harness"
)

// The limits of CONTRIBUTING.md for all product code. They only become stricter.
const (
	minMean    = 5.3
	maxShort   = 25.0
	minDensity = 4.0
)

func TestNames(t *testing.T) {
	counts, err := measure([]string{"../../../pkg", "../../../cmd"})
	harness.Must(t, err)
	var total count
	for _, c := range counts {
		total.add(c)
	}
	if total.mean() < minMean || total.shortShare() > maxShort || total.density() < minDensity {
		t.Errorf("letters, share of short names, comments in functions:%s; want %.2f, %.1f%%, %.2f; "+
			"find the folders: go run ./test/style/names", total, minMean, maxShort, minDensity)
	}
}

func TestMeasureFile(t *testing.T) {
	const text = `package a

type group struct{ id, name string }

func (g *group) rename(name string) (err error) {
	// Callers hold no lock.
	for _, at := range []int{1} {
		old, _ := at, at
		println(old) // a comment behind code
	}
	return nil
}
`
	fileSet := token.NewFileSet()
	file, err := parser.ParseFile(fileSet, "a.go", text, parser.ParseComments)
	harness.Must(t, err)
	// group, id, name, g, rename, name, err, at, old
	got := fmt.Sprintf("%+v", struct{ count }{measureFile(fileSet, file)}.count.fields())
	if want := "[9 30 3 8 2]"; got != want {
		t.Errorf("measured %s, want %s", got, want)
	}
}

func (c count) fields() []int { return []int{c.identifiers, c.letters, c.short, c.lines, c.comments} }
