package docs

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/test/harness"
)

// block is a fenced block.
type block struct {
	info string // the text after the opening fence
	line int    // of the opening fence
	text string
}

// line is a line outside of fenced blocks.
type line struct {
	number int
	text   string
}

// document is a Markdown file.
type document struct {
	path   string
	blocks []block
	prose  []line
}

// operations returns the first aid, which explains reasons and denials.
func operations(t *testing.T) *document { return read(t, filepath.Join(root, "docs", "operations.md")) }

// reference returns the document of health services, metrics and alerts.
func reference(t *testing.T) *document { return read(t, filepath.Join(root, "docs", "reference.md")) }

// documents returns all Markdown files of the repository.
func documents(t *testing.T) []*document {
	t.Helper()
	var all []*document
	err := filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if name := d.Name(); name == ".git" || path == filepath.Join(root, "bin") {
				return filepath.SkipDir
			}
			return nil
		}
		if strings.HasSuffix(path, ".md") {
			all = append(all, read(t, path))
		}
		return nil
	})
	harness.Must(t, err)
	if len(all) < 3 {
		t.Fatalf("only %d documents found", len(all))
	}
	return all
}

func read(t *testing.T, path string) *document {
	t.Helper()
	b, err := os.ReadFile(path)
	harness.Must(t, err)
	d := &document{path: path}
	var open *block
	indent := 0
	for i, text := range strings.Split(string(b), "\n") {
		info, isFence := strings.CutPrefix(strings.TrimLeft(text, " "), "```")
		switch {
		case isFence && open == nil:
			open = &block{info: strings.TrimSpace(info), line: i + 1}
			indent = len(text) - len(strings.TrimLeft(text, " "))
		case isFence:
			d.blocks = append(d.blocks, *open)
			open = nil
		case open != nil:
			open.text += strings.TrimPrefix(text, strings.Repeat(" ", indent)) + "\n"
		default:
			d.prose = append(d.prose, line{i + 1, text})
		}
	}
	if open != nil {
		t.Fatalf("%s:%d: a fenced block that never ends", path, open.line)
	}
	return d
}

var (
	headingPattern = regexp.MustCompile(`^#{1,6} +(.+?) *$`)
	inlinePattern  = regexp.MustCompile("`([^`]+)`")
	notInSlug      = regexp.MustCompile(`[^\p{L}\p{N} _-]`)
)

// heading returns the text of a heading, "" for any other line.
func heading(text string) string {
	if m := headingPattern.FindStringSubmatch(text); m != nil {
		return m[1]
	}
	return ""
}

// anchors returns the fragments that GitHub generates from the headings.
func (d *document) anchors() map[string]bool {
	found := map[string]bool{}
	for _, l := range d.prose {
		if h := heading(l.text); h != "" {
			found[strings.ReplaceAll(notInSlug.ReplaceAllString(strings.ToLower(h), ""), " ", "-")] = true
		}
	}
	return found
}

// below returns the lines under a heading, or under a line that is equal to it,
// up to the next heading.
func (d *document) below(t *testing.T, title string) []line {
	t.Helper()
	for i, l := range d.prose {
		if heading(l.text) != title && l.text != title {
			continue
		}
		rest := d.prose[i+1:]
		for j, m := range rest {
			if heading(m.text) != "" {
				return rest[:j]
			}
		}
		return rest
	}
	t.Fatalf("%s has no heading or line %q", d.path, title)
	return nil
}

// table returns the cells of the first table in lines, without its head.
func table(t *testing.T, lines []line) [][]string {
	t.Helper()
	var rows [][]string
	for _, l := range lines {
		row, is := strings.CutPrefix(strings.TrimSpace(l.text), "|")
		if !is {
			if len(rows) > 0 {
				break
			}
			continue
		}
		var cells []string
		for _, c := range strings.Split(strings.TrimSuffix(row, "|"), "|") {
			cells = append(cells, strings.TrimSpace(c))
		}
		rows = append(rows, cells)
	}
	if len(rows) < 3 {
		t.Fatal("no table where one is expected")
	}
	return rows[2:]
}

// code returns the inline code in a text.
func code(text string) []string {
	var found []string
	for _, m := range inlinePattern.FindAllStringSubmatch(text, -1) {
		found = append(found, m[1])
	}
	return found
}
