package style

import (
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/test/harness"
)

// durationFile lists the functions of tests that may compare a measured duration with an upper
// bound, each with the reason.
const durationFile = "testdata/durations.txt"

// TestNoAbsoluteTimes refuses upper bounds of measured durations in tests: a stall of the machine
// exceeds each of them. A test asserts an order of events, or a ratio of two measured durations;
// `make bench` judges the durations themselves.
func TestNoAbsoluteTimes(t *testing.T) {
	folders := map[string]map[string]*ast.File{}
	files := token.NewFileSet()
	for _, file := range goFiles(t) {
		if !strings.HasSuffix(file, "_test.go") {
			continue
		}
		tree, err := parser.ParseFile(files, filepath.Join(root, file), nil, parser.SkipObjectResolution)
		harness.Must(t, err)
		folder := filepath.Dir(file)
		if folders[folder] == nil {
			folders[folder] = map[string]*ast.File{}
		}
		folders[folder][file] = tree
	}
	found := map[string][]int{} // lines, by file and function
	for _, folder := range folders {
		for place, positions := range upperBounds(folder) {
			for _, position := range positions {
				found[place] = append(found[place], files.Position(position).Line)
			}
		}
	}
	allowed := readDurations(t)
	for _, place := range slices.Sorted(maps.Keys(found)) {
		if allowed[place] == "" {
			t.Errorf("%s compares a measured duration with a bound in lines %v: assert an order or a ratio, or log it",
				place, found[place])
		}
	}
	for place := range allowed {
		if found[place] == nil {
			t.Errorf("%s: remove %s, which has no such comparison", durationFile, place)
		}
	}
}

// readDurations returns the reason of each allowed function.
func readDurations(t *testing.T) map[string]string {
	t.Helper()
	text, err := os.ReadFile(durationFile)
	harness.Must(t, err)
	allowed := map[string]string{}
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		place, reason, _ := strings.Cut(strings.TrimSpace(line), ": ")
		if reason == "" {
			t.Errorf("%s: %q has no reason", durationFile, line)
		}
		allowed[place] = reason
	}
	return allowed
}

// upperBounds returns the comparisons of the files of a folder that have a measured duration on the
// greater side only, by file and function. Durations are followed through variables, and through
// functions that return them. In a bubble of synctest clocks advance as the test says.
func upperBounds(folder map[string]*ast.File) map[string][]token.Pos {
	functions := map[*ast.FuncDecl]string{} // with the file and the name
	for file, tree := range folder {
		for _, declaration := range tree.Decls {
			if function, ok := declaration.(*ast.FuncDecl); ok && function.Body != nil {
				functions[function] = file + " " + function.Name.Name
			}
		}
	}
	m := measurement{functions: map[string]bool{}, bubbles: map[string]bool{}}
	for before := -1; before < len(m.bubbles); {
		before = len(m.bubbles)
		for function := range functions {
			m.inspect(function, func(ast.Node) {})
		}
	}
	found := map[string][]token.Pos{}
	for before := -1; before < len(m.functions); {
		before = len(m.functions)
		for function, place := range functions {
			if bounds := m.function(function); len(bounds) > 0 {
				found[place] = bounds
			}
		}
	}
	return found
}

// measurement follows measured durations through the functions of a package.
type measurement struct {
	functions map[string]bool // return a measured duration
	bubbles   map[string]bool // run a function in a bubble of synctest

	// In the current function.
	instants, durations map[string]bool
	differences         map[string]bool // of any two times
}

// function follows the durations in a function, and returns its comparisons.
func (m *measurement) function(function *ast.FuncDecl) (bounds []token.Pos) {
	m.instants, m.durations, m.differences = map[string]bool{}, map[string]bool{}, map[string]bool{}
	for _, field := range function.Type.Params.List {
		if isSelector(field.Type, "time", "Time") {
			for _, name := range field.Names {
				m.instants[name.Name] = true
			}
		}
	}
	for before := -1; before < len(m.instants)+len(m.durations); {
		before = len(m.instants) + len(m.durations)
		m.inspect(function, func(node ast.Node) {
			switch statement := node.(type) {
			case *ast.AssignStmt:
				m.assign(statement.Lhs, statement.Rhs)
			case *ast.ValueSpec:
				var names []ast.Expr
				for _, name := range statement.Names {
					names = append(names, name)
				}
				m.assign(names, statement.Values)
			case *ast.ReturnStmt:
				if slices.ContainsFunc(statement.Results, m.isDuration) {
					m.functions[function.Name.Name] = true
				}
			}
		})
	}
	m.inspect(function, func(node ast.Node) {
		if comparison, ok := node.(*ast.BinaryExpr); ok && m.isUpperBound(comparison) {
			bounds = append(bounds, comparison.Pos())
		}
	})
	return bounds
}

// TestParallelParents refuses a test that is not parallel and whose parts are: the tests after it wait
// for the slowest part.
func TestParallelParents(t *testing.T) {
	parts, itself := regexp.MustCompile(`\n\t\t+t\.Parallel\(\)`), regexp.MustCompile(`\n\tt\.Parallel\(\)`)
	test := regexp.MustCompile(`(?ms)^func (Test\w+)\(t \*testing\.T\) \{$.*?^\}$`)
	for _, file := range goFiles(t) {
		if !strings.HasPrefix(file, "test/e2e/") && !strings.HasPrefix(file, "test/kube-e2e/") {
			continue
		}
		text, err := os.ReadFile(filepath.Join(root, file))
		harness.Must(t, err)
		for _, m := range test.FindAllSubmatch(text, -1) {
			if parts.Match(m[0]) && !itself.Match(m[0]) {
				t.Errorf("%s: %s has parallel parts and is not parallel", file, m[1])
			}
		}
	}
}

// inspect visits the nodes of a function outside of bubbles. It notes the function if it runs its
// argument in one.
func (m *measurement) inspect(function *ast.FuncDecl, visit func(ast.Node)) {
	ast.Inspect(function.Body, func(node ast.Node) bool {
		if call, ok := node.(*ast.CallExpr); ok {
			name, _ := call.Fun.(*ast.Ident)
			if isSelector(call.Fun, "synctest", "Test") || name != nil && m.bubbles[name.Name] {
				takesFunction := slices.ContainsFunc(function.Type.Params.List, func(field *ast.Field) bool {
					_, ok := field.Type.(*ast.FuncType)
					return ok
				})
				if takesFunction {
					m.bubbles[function.Name.Name] = true
				}
				return false
			}
		}
		visit(node)
		return true
	})
}

func (m *measurement) assign(left, right []ast.Expr) {
	for i, value := range right {
		name, ok := left[min(i, len(left)-1)].(*ast.Ident)
		if !ok {
			continue
		}
		if m.isInstant(value) {
			m.instants[name.Name] = true
		}
		if m.isDuration(value) {
			m.durations[name.Name] = true
		}
		if call, ok := value.(*ast.CallExpr); ok && len(call.Args) == 1 {
			if selector, ok := call.Fun.(*ast.SelectorExpr); ok && selector.Sel.Name == "Sub" {
				m.differences[name.Name] = true
			}
		}
	}
}

// isInstant reports whether an expression is the time of a call of time.Now, or a parameter.
func (m *measurement) isInstant(expression ast.Expr) bool {
	switch e := expression.(type) {
	case *ast.Ident:
		return m.instants[e.Name]
	case *ast.CallExpr:
		return isSelector(e.Fun, "time", "Now")
	}
	return false
}

// isDuration reports whether an expression is a measured duration, or a list of them.
func (m *measurement) isDuration(expression ast.Expr) bool {
	switch e := expression.(type) {
	case *ast.Ident:
		return m.durations[e.Name]
	case *ast.ParenExpr:
		return m.isDuration(e.X)
	case *ast.IndexExpr:
		return m.isDuration(e.X)
	case *ast.BinaryExpr:
		return (e.Op == token.ADD || e.Op == token.SUB || e.Op == token.QUO) && (m.isDuration(e.X) || m.isDuration(e.Y))
	case *ast.CallExpr:
		return m.isMeasuring(e)
	}
	return false
}

func (m *measurement) isMeasuring(call *ast.CallExpr) bool {
	switch function := call.Fun.(type) {
	case *ast.Ident:
		if slices.Contains([]string{"append", "max", "min"}, function.Name) {
			return slices.ContainsFunc(call.Args, m.isDuration)
		}
		return m.functions[function.Name]
	case *ast.SelectorExpr:
		switch {
		case isSelector(function, "time", "Since"):
			return true
		case function.Sel.Name == "Sub" && len(call.Args) == 1:
			return m.isInstant(call.Args[0]) || m.isInstant(function.X)
		case slices.Contains([]string{"Round", "Abs", "Truncate", "Seconds", "Milliseconds"}, function.Sel.Name):
			return m.isDuration(function.X)
		}
		return m.functions[function.Sel.Name]
	}
	return false
}

// isUpperBound reports whether only the greater side of a comparison is a measured duration. The
// sign of a difference of two times is their order.
func (m *measurement) isUpperBound(comparison *ast.BinaryExpr) bool {
	greater, less := comparison.X, comparison.Y
	switch comparison.Op {
	case token.GTR, token.GEQ:
	case token.LSS, token.LEQ:
		greater, less = less, greater
	default:
		return false
	}
	if name, ok := less.(*ast.Ident); ok && m.differences[name.Name] {
		return false
	}
	zero, ok := less.(*ast.BasicLit)
	return m.isDuration(greater) && !m.isDuration(less) && !(ok && zero.Value == "0")
}

func isSelector(expression ast.Expr, receiver, name string) bool {
	selector, ok := expression.(*ast.SelectorExpr)
	if !ok || selector.Sel.Name != name {
		return false
	}
	x, ok := selector.X.(*ast.Ident)
	return ok && x.Name == receiver
}

func TestUpperBounds(t *testing.T) {
	for _, c := range []struct{ name, body, want string }{
		{"since", "if time.Since(began) > time.Second {}", "3"},
		{"variable", "took := time.Since(began)\nif bound < took {}", "4"},
		{"list", "var all []time.Duration\nall = append(all, time.Now().Sub(began))\nif all[1] >= bound {}", "5"},
		{"function", "if took(began).Round(time.Second) > bound {}", "3"},
		{"two instants", "start := time.Now()\nif x.At.Sub(start) > bound {}", "4"},
		{"parameter", "if x.At.Sub(since) > bound {}", "3"},
		{"lower bound", "if time.Since(began) < bound {}", ""},
		{"order", "if x.At.Sub(since) > 0 {}", ""},
		{"ratio", "gap := a.At.Sub(b.At)\nif time.Since(began) > gap {}", ""},
		{"simulated clock", "if x.now.Sub(x.began) > bound {}", ""},
		{"bubble", "bubble(func() { if time.Since(began) > bound {} })", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			files := token.NewFileSet()
			tree, err := parser.ParseFile(files, "a_test.go", "package a\nfunc f(since time.Time) {\n"+c.body+
				"\n}\nfunc took(t time.Time) time.Duration { return time.Since(t) }\n"+
				"func bubble(f func()) { synctest.Test(t, f) }", parser.SkipObjectResolution)
			harness.Must(t, err)
			var got []string
			for _, positions := range upperBounds(map[string]*ast.File{"a_test.go": tree}) {
				for _, position := range positions {
					got = append(got, strconv.Itoa(files.Position(position).Line))
				}
			}
			if lines := strings.Join(got, " "); lines != c.want {
				t.Errorf("found in lines %q, want %q", lines, c.want)
			}
		})
	}
}
