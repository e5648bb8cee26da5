package language

import (
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const (
	root          = "../.."
	wordFile      = "testdata/words.txt"
	allowanceFile = "testdata/allowance.txt"
)

var update = flag.Bool("update", false, "write the present counts to "+allowanceFile)

// hit is a word of the list in a file.
type hit struct {
	file string
	line int
	word string
}

// TestWords compares the hits of each directory with its allowance. The counts
// must be equal, so that an allowance falls with the last word it was for.
func TestWords(t *testing.T) {
	list, instead := readWords(t)
	found := map[string][]hit{}
	for _, file := range sources(t) {
		text, err := os.ReadFile(filepath.Join(root, file))
		if err != nil {
			t.Fatal(err)
		}
		hits, err := search(list, file, text)
		if err != nil {
			t.Fatal(err)
		}
		if dir := filepath.Dir(file); len(hits) > 0 {
			found[dir] = append(found[dir], hits...)
		}
	}
	if *update {
		writeAllowance(t, found)
		return
	}
	allowed := readAllowance(t)
	for _, dir := range slices.Sorted(maps.Keys(found)) {
		if len(found[dir]) <= allowed[dir] {
			continue
		}
		for _, h := range found[dir] {
			t.Errorf("%s:%d: %q; use %s", h.file, h.line, h.word, instead[h.word])
		}
		t.Errorf("%s: %d words of %s, allowed are %d", dir, len(found[dir]), wordFile, allowed[dir])
	}
	for _, dir := range slices.Sorted(maps.Keys(allowed)) {
		if n := len(found[dir]); n < allowed[dir] {
			t.Errorf("%s: %d words of %s, allowed are %d; run go test ./test/language -update", dir, n, wordFile, allowed[dir])
		}
	}
}

func TestSearch(t *testing.T) {
	list, _ := readWords(t)
	for _, c := range []struct{ name, file, text, want string }{
		{"comment", "a.go", "package a\n\n// f tells whether.\nfunc f() {}", "3 tells whether"},
		{"comment over two lines", "a.go", "package a\n\n// f tells\n// whether.\nfunc f() {}", "3 tells whether"},
		{"string", "a.go", "package a\n\nconst c = \"it is \" + `a\nmended`", "4 mended"},
		{"function of a test", "a_test.go", "package a\n\nfunc TestRuleMadeAnew() {}", "3 made 3 anew"},
		{"other identifier", "a.go", "package a\n\nfunc made() {}", ""},
		{"import", "a.go", "package a\n\nimport _ \"x/made\"", ""},
		{"document", "a.md", "Always\nmade. By\nhand.", "2 made 2 by hand"},
		{"script", "a.sh", "# Nobody.\n", "1 nobody"},
		{"placeholder", "a.md", "`*` stands for a segment.", ""},
		{"part of a word", "a.md", "amended always", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			hits, err := search(list, c.file, []byte(c.text))
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, h := range hits {
				got = append(got, fmt.Sprint(h.line, " ", h.word))
			}
			if s := strings.Join(got, " "); s != c.want {
				t.Fatalf("found %q, want %q", s, c.want)
			}
		})
	}
}

// sources returns the files that people write, relative to root. Recorded output,
// fuzz corpora and generated code are left out.
func sources(t *testing.T) []string {
	t.Helper()
	var files []string
	err := fs.WalkDir(os.DirFS(root), ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := d.Name()
		if d.IsDir() {
			skipped := name == ".git" || name == ".cache" || name == "fuzz" || path == "bin" || path == "pkg/api" ||
				path == "test/language"
			if skipped {
				return fs.SkipDir
			}
			return nil
		}
		switch filepath.Ext(name) {
		case ".go", ".md", ".proto", ".sh", ".tmpl", ".txtar", ".yaml", ".yml", ".Dockerfile":
			files = append(files, path)
		case "":
			if name == "Makefile" || name == "CODEOWNERS" || path == ".ci/run" {
				files = append(files, path)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// search returns the hits in a file: in Go files those in comments, strings and
// names of tests, in others those in the whole text.
func search(list *regexp.Regexp, file string, text []byte) ([]hit, error) {
	if filepath.Ext(file) != ".go" {
		return match(list, file, 1, string(text)), nil
	}
	set := token.NewFileSet()
	tree, err := parser.ParseFile(set, file, text, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	line := func(n ast.Node) int { return set.Position(n.Pos()).Line }
	var hits []hit
	for _, group := range tree.Comments {
		// The text of the group keeps its lines, so that a term is found across two.
		var lines []string
		for _, c := range group.List {
			lines = append(lines, strings.Replace(c.Text, "//", "", 1))
		}
		hits = append(hits, match(list, file, line(group), strings.Join(lines, "\n"))...)
	}
	ast.Inspect(tree, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.ImportSpec:
			return false
		case *ast.BasicLit:
			if n.Kind == token.STRING {
				hits = append(hits, match(list, file, line(n), n.Value)...)
			}
		case *ast.FuncDecl:
			if strings.HasSuffix(file, "_test.go") && testName.MatchString(n.Name.Name) {
				hits = append(hits, match(list, file, line(n), capital.ReplaceAllString(n.Name.Name, " $0"))...)
			}
		}
		return true
	})
	return hits, nil
}

var (
	testName = regexp.MustCompile(`^(?:Test|Fuzz|Benchmark|Example)`)
	capital  = regexp.MustCompile(`[A-Z]`)
	space    = regexp.MustCompile(`\s+`)
)

// match returns the hits in text, whose first line has the number first.
func match(list *regexp.Regexp, file string, first int, text string) []hit {
	var hits []hit
	for _, at := range list.FindAllStringIndex(text, -1) {
		word := strings.ToLower(space.ReplaceAllString(text[at[0]:at[1]], " "))
		if word == "stands" && strings.HasPrefix(text[at[1]:], " for ") {
			continue
		}
		hits = append(hits, hit{file, first + strings.Count(text[:at[0]], "\n"), word})
	}
	return hits
}

// readWords returns an expression for the words of the list and, for each word,
// what to use instead of it.
func readWords(t *testing.T) (list *regexp.Regexp, instead map[string]string) {
	t.Helper()
	instead = readPairs(t, wordFile, " = ")
	var alternatives []string
	for _, word := range slices.Sorted(maps.Keys(instead)) {
		alternatives = append(alternatives, strings.ReplaceAll(regexp.QuoteMeta(word), " ", `\s+`))
	}
	slices.Reverse(alternatives) // longer ones first
	return regexp.MustCompile(`(?i)\b(?:` + strings.Join(alternatives, "|") + `)\b`), instead
}

func readAllowance(t *testing.T) map[string]int {
	t.Helper()
	allowed := map[string]int{}
	for dir, count := range readPairs(t, allowanceFile, " ") {
		n, err := strconv.Atoi(count)
		if err != nil || n < 1 {
			t.Fatalf("%s: %s: %q is not a count", allowanceFile, dir, count)
		}
		allowed[dir] = n
	}
	return allowed
}

func writeAllowance(t *testing.T, found map[string][]hit) {
	t.Helper()
	text := "# Directories that still have words of words.txt. The counts only fall.\n"
	for _, dir := range slices.Sorted(maps.Keys(found)) {
		text += fmt.Sprintf("%s %d\n", dir, len(found[dir]))
	}
	if err := os.WriteFile(allowanceFile, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// readPairs reads lines of a key and a value. Lines that begin with # are comments.
func readPairs(t *testing.T, path, separator string) map[string]string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	pairs := map[string]string{}
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		key, value, ok := strings.Cut(line, separator)
		if !ok {
			t.Fatalf("%s: %q has no %q", path, line, separator)
		}
		pairs[key] = value
	}
	return pairs
}
