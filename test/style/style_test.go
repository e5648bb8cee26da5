package style

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
	"unicode/utf8"

	"github.com/vipgate/vipgate/test/harness"
)

const (
	root          = "../.."
	wordFile      = "testdata/words.txt"
	allowanceFile = "testdata/allowance.txt"
)

var update = flag.Bool("update", false, "lower the counts in "+allowanceFile)

// finding is a place in a file that breaks a rule.
type finding struct {
	rule   string
	file   string
	line   int
	detail string
}

// TestStyle compares the findings of each directory with its allowance. The counts must be
// equal, so that the allowance is lowered when findings are fixed.
func TestStyle(t *testing.T) {
	list, instead := readWords(t)
	found := map[string][]finding{} // by directory and rule
	for _, file := range sources(t) {
		text, err := os.ReadFile(filepath.Join(root, file))
		harness.Must(t, err)
		words, err := search(list, file, text)
		harness.Must(t, err)
		for i, f := range words {
			words[i].detail = fmt.Sprintf("%q; use %s", f.detail, instead[f.detail])
		}
		for _, f := range append(words, longLines(file, string(text))...) {
			key := filepath.Dir(file) + " " + f.rule
			found[key] = append(found[key], f)
		}
	}
	allowed := readAllowance(t)
	if *update {
		writeAllowance(t, found, allowed)
		return
	}
	for _, key := range slices.Sorted(maps.Keys(found)) {
		if len(found[key]) <= allowed[key] {
			continue
		}
		for _, f := range found[key] {
			t.Errorf("%s:%d: %s", f.file, f.line, f.detail)
		}
		t.Errorf("%s: found %d, allowed %d", key, len(found[key]), allowed[key])
	}
	for _, key := range slices.Sorted(maps.Keys(allowed)) {
		if n := len(found[key]); n < allowed[key] {
			t.Errorf("%s: found %d, allowed %d; run go test ./test/style -update", key, n, allowed[key])
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
		{"comment of a contract", "a.proto", "// Made.\nT made = 1; // Told.", "1 made 2 told"},
		{"placeholder", "a.md", "`*` stands for a segment.", ""},
		{"part of a word", "a.md", "amended always", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			found, err := search(list, c.file, []byte(c.text))
			harness.Must(t, err)
			var got []string
			for _, f := range found {
				got = append(got, fmt.Sprint(f.line, " ", f.detail))
			}
			if s := strings.Join(got, " "); s != c.want {
				t.Fatalf("found %q, want %q", s, c.want)
			}
		})
	}
}

func TestLongLines(t *testing.T) {
	long := strings.Repeat("word ", 21) // 105 characters
	for _, c := range []struct{ name, file, text, want string }{
		{"comment", "a.go", "\n\t// " + long, "2 comments"},
		{"code of 108", "a.go", "x(`" + long + "`)", ""},
		{"code of 129", "a.go", "x(`" + long + strings.Repeat("x", 21) + "`)", "1 lines"},
		{"tag of a struct", "a.go", "A int `help:\"" + long + long + "\"`", ""},
		{"prose", "a.md", "short\n" + long, "2 prose"},
		{"table, code and link", "a.md", "| " + long + "|\n```\n" + long + "\n```\n- https://" + strings.Repeat("x", 99), ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			var got []string
			for _, f := range longLines(c.file, c.text) {
				got = append(got, fmt.Sprint(f.line, " ", f.rule))
			}
			if s := strings.Join(got, " "); s != c.want {
				t.Fatalf("found %q, want %q", s, c.want)
			}
		})
	}
}

// sources returns the handwritten files, relative to root. Recorded output, fuzz corpora and
// generated code are left out.
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
				path == "test/style"
			if skipped {
				return fs.SkipDir
			}
			return nil
		}
		switch filepath.Ext(name) {
		case ".go", ".md", ".proto", ".sh", ".tmpl", ".txtar", ".yaml", ".yml", ".Dockerfile":
			files = append(files, path)
		case ".txt":
			if strings.HasPrefix(path, "pkg/status/") { // embedded texts
				files = append(files, path)
			}
		case "":
			if name == "Makefile" || name == "CODEOWNERS" || path == ".ci/run" {
				files = append(files, path)
			}
		}
		return nil
	})
	harness.Must(t, err)
	return files
}

// search returns the listed words in a file: in Go files it searches comments, strings and names
// of tests, in contracts only comments, in all other files the whole text.
func search(list *regexp.Regexp, file string, text []byte) ([]finding, error) {
	switch filepath.Ext(file) {
	case ".go":
	case ".proto":
		return match(list, file, 1, protoCode.ReplaceAllString(string(text), "")), nil
	default:
		return match(list, file, 1, string(text)), nil
	}
	set := token.NewFileSet()
	tree, err := parser.ParseFile(set, file, text, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	line := func(n ast.Node) int { return set.Position(n.Pos()).Line }
	var found []finding
	for _, group := range tree.Comments {
		// The text of the group keeps its lines, so that a term is found across two.
		var lines []string
		for _, c := range group.List {
			lines = append(lines, strings.Replace(c.Text, "//", "", 1))
		}
		found = append(found, match(list, file, line(group), strings.Join(lines, "\n"))...)
	}
	ast.Inspect(tree, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.ImportSpec:
			return false
		case *ast.BasicLit:
			if n.Kind == token.STRING {
				found = append(found, match(list, file, line(n), n.Value)...)
			}
		case *ast.FuncDecl:
			if strings.HasSuffix(file, "_test.go") && testName.MatchString(n.Name.Name) {
				found = append(found, match(list, file, line(n), capital.ReplaceAllString(n.Name.Name, " $0"))...)
			}
		}
		return true
	})
	return found, nil
}

var (
	testName = regexp.MustCompile(`^(?:Test|Fuzz|Benchmark|Example)`)
	capital  = regexp.MustCompile(`[A-Z]`)
	// protoCode matches the code before a comment: its names are part of the wire protocol.
	protoCode = regexp.MustCompile(`(?m)^[^/\n]*(?:/[^/\n]+)*`)
	space     = regexp.MustCompile(`\s+`)
)

// match returns the words of the list in text, whose first line has the number first.
func match(list *regexp.Regexp, file string, first int, text string) []finding {
	var found []finding
	for _, at := range list.FindAllStringIndex(text, -1) {
		word := strings.ToLower(space.ReplaceAllString(text[at[0]:at[1]], " "))
		if word == "stands" && strings.HasPrefix(text[at[1]:], " for ") {
			continue
		}
		found = append(found, finding{"words", file, first + strings.Count(text[:at[0]], "\n"), word})
	}
	return found
}

const (
	maxCode  = 120
	maxProse = 100
)

var (
	comment = regexp.MustCompile(`^\s*//[^:]*$`) // not a directive, and no line with a URL
	fence   = regexp.MustCompile("^\\s*```")
	tag     = regexp.MustCompile("`[a-z_]+:\"[^`]*`") // of a field of a struct
)

// longLines returns the lines of Go code and of documents that are too long.
// Tables, code and links of a document and tags of structs cannot be wrapped.
func longLines(file, text string) []finding {
	var found []finding
	fenced := false
	number := 0
	for line := range strings.Lines(text) {
		number++
		line = strings.TrimRight(line, "\n")
		rule, limit := "lines", maxCode
		switch filepath.Ext(file) {
		case ".go":
			if comment.MatchString(line) {
				rule, limit = "comments", maxProse
			} else if tag.MatchString(line) {
				continue
			}
		case ".md":
			if fence.MatchString(line) {
				fenced = !fenced
			}
			if fenced || strings.HasPrefix(line, "|") || !strings.Contains(strings.TrimLeft(line, " -*"), " ") {
				continue
			}
			rule, limit = "prose", maxProse
		default:
			continue
		}
		if n := utf8.RuneCountInString(line); n > limit {
			found = append(found, finding{rule, file, number, fmt.Sprintf("line has %d characters; at most %d", n, limit)})
		}
	}
	return found
}

// readWords returns an expression for the words of the list and the replacement of each word.
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
	for key, count := range readPairs(t, allowanceFile, ": ") {
		n, err := strconv.Atoi(count)
		if err != nil || n < 1 {
			t.Fatalf("%s: %s: %q is not a count", allowanceFile, key, count)
		}
		allowed[key] = n
	}
	return allowed
}

// writeAllowance lowers the counts. It raises none: a new finding is corrected.
func writeAllowance(t *testing.T, found map[string][]finding, allowed map[string]int) {
	t.Helper()
	text := "# Findings that remain, by directory and rule. The counts only fall.\n"
	for _, key := range slices.Sorted(maps.Keys(allowed)) {
		if n := min(len(found[key]), allowed[key]); n > 0 {
			text += fmt.Sprintf("%s: %d\n", key, n)
		}
	}
	harness.Must(t, os.WriteFile(allowanceFile, []byte(text), 0o644))
}

// readPairs reads lines of a key and a value. Lines that begin with # are comments.
func readPairs(t *testing.T, path, separator string) map[string]string {
	t.Helper()
	text, err := os.ReadFile(path)
	harness.Must(t, err)
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
