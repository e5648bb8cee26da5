package translation_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// The table of docs/kubernetes.md contains exactly the reasons of refusals.
func TestReasonsAreDocumented(t *testing.T) {
	file, err := parser.ParseFile(token.NewFileSet(), "reasons.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	reasons := map[string]bool{}
	ast.Inspect(file, func(n ast.Node) bool {
		if l, ok := n.(*ast.BasicLit); ok {
			reason, _ := strconv.Unquote(l.Value)
			reasons[reason] = true
		}
		return true
	})
	delete(reasons, "Valid")
	delete(reasons, "Accepted")
	text, err := os.ReadFile("../../../docs/kubernetes.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, found := strings.Cut(string(text), "<!-- reasons: compared with the program by a test -->\n")
	table, _, _ = strings.Cut(table, "\n\n")
	var documented []string
	for _, m := range regexp.MustCompile("(?m)^\\| `([A-Za-z]+)` \\|").FindAllStringSubmatch(table, -1) {
		documented = append(documented, m[1])
	}
	slices.Sort(documented)
	if want := slices.Sorted(maps.Keys(reasons)); !found || !slices.Equal(documented, want) {
		t.Errorf("documented are %v, reasons %v", documented, want)
	}
}
