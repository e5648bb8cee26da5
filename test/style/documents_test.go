package style

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v4"

	"github.com/vipgate/vipgate/test/harness"
)

// TestDecisionIndex checks that docs/adr/README.md has each record once, by its number, and that no
// number is used twice.
func TestDecisionIndex(t *testing.T) {
	index, err := os.ReadFile(filepath.Join(root, "docs/adr/README.md"))
	harness.Must(t, err)
	files, err := filepath.Glob(filepath.Join(root, "docs/adr/[0-9]*.md"))
	harness.Must(t, err)
	for _, problem := range indexProblems(string(index), files) {
		t.Error(problem)
	}
	if len(files) < 40 {
		t.Errorf("found only %d records", len(files))
	}
}

// entry matches a record in the index.
var entry = regexp.MustCompile(`\[(\d+) [^\]]+\]\(([^)]+)\)`)

func indexProblems(index string, files []string) (problems []string) {
	listed, numbers := map[string]int{}, map[string]string{}
	for _, m := range entry.FindAllStringSubmatch(index, -1) {
		listed[m[2]]++
		if !strings.HasPrefix(m[2], fmt.Sprintf("%04s-", m[1])) {
			problems = append(problems, fmt.Sprintf("the index calls %s number %s", m[2], m[1]))
		}
	}
	for _, file := range files {
		name := filepath.Base(file)
		if listed[name] != 1 {
			problems = append(problems, fmt.Sprintf("the index has %s %d times", name, listed[name]))
		}
		number, _, _ := strings.Cut(name, "-")
		if other := numbers[number]; other != "" {
			problems = append(problems, fmt.Sprintf("%s and %s have the same number", other, name))
		}
		numbers[number] = name
		delete(listed, name)
	}
	for name := range listed {
		problems = append(problems, fmt.Sprintf("the index has %s, which does not exist", name))
	}
	return problems
}

func TestIndexProblems(t *testing.T) {
	for name, c := range map[string]struct {
		index string
		files []string
		want  int
	}{
		"complete":    {"[1 a](0001-a.md),\n[12 b](0012-b.md)", []string{"0001-a.md", "0012-b.md"}, 0},
		"missing":     {"[1 a](0001-a.md)", []string{"0001-a.md", "0002-b.md"}, 1},
		"twice":       {"[1 a](0001-a.md) [1 a](0001-a.md)", []string{"0001-a.md"}, 1},
		"number":      {"[2 a](0001-a.md)", []string{"0001-a.md"}, 1},
		"same number": {"[1 a](0001-a.md) [1 b](0001-b.md)", []string{"0001-a.md", "0001-b.md"}, 1},
		"removed":     {"[1 a](0001-a.md)", nil, 1},
	} {
		if got := indexProblems(c.index, c.files); len(got) != c.want {
			t.Errorf("%s: %q, want %d", name, got, c.want)
		}
	}
}

// fencedBlock is a block of a document, with the text after its opening fence.
type fencedBlock struct {
	info string
	line int
	text string
}

// fencedBlocks returns the blocks of a document and its other text, in which their lines are empty.
func fencedBlocks(text string) (blocks []fencedBlock, prose string) {
	var open *fencedBlock
	number := 0
	for line := range strings.Lines(text) {
		number++
		info, isFence := strings.CutPrefix(strings.TrimSpace(line), "```")
		switch {
		case isFence && open == nil:
			open = &fencedBlock{info: info, line: number}
		case isFence:
			blocks = append(blocks, *open)
			open = nil
		case open != nil:
			open.text += line
		default:
			prose += line
			continue
		}
		prose += "\n"
	}
	return blocks, prose
}

// TestYAMLOfDocuments checks that each YAML block of a document is YAML, in which a key occurs once.
func TestYAMLOfDocuments(t *testing.T) {
	found := 0
	for _, file := range sources(t) {
		if filepath.Ext(file) != ".md" {
			continue
		}
		text, err := os.ReadFile(filepath.Join(root, file))
		harness.Must(t, err)
		blocks, _ := fencedBlocks(string(text))
		for _, b := range blocks {
			if kind, _, _ := strings.Cut(b.info, " "); kind != "yaml" {
				continue
			}
			found++
			if err := checkYAML(b.text); err != nil {
				t.Errorf("%s:%d: %v", file, b.line, err)
			}
		}
	}
	if found < 15 {
		t.Errorf("found only %d blocks", found)
	}
}

func checkYAML(text string) error {
	decoder := yaml.NewDecoder(strings.NewReader(text))
	for {
		var value any
		if err := decoder.Decode(&value); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
	}
}

func TestCheckYAML(t *testing.T) {
	harness.Check(t, checkYAML("a: 1\n---\na: 2\n"))
	harness.WantError(t, checkYAML("check: {a: 1}\ncheck: {b: 1}\n"), "already")
	harness.WantError(t, checkYAML("a: [\n"), "")
}

// programFlags returns the flags of each program, from the generated list.
func programFlags(t *testing.T) map[string][]string {
	t.Helper()
	text, err := os.ReadFile("testdata/flags.txt")
	harness.Must(t, err)
	flags, program := map[string][]string{}, ""
	for line := range strings.Lines(string(text)) {
		switch words := strings.Fields(line); {
		case len(words) == 4 && words[1] == "begin":
			program = words[2]
		case len(words) == 4:
			program = ""
		case len(words) == 1 && program != "":
			flags[program] = append(flags[program], words[0])
		}
	}
	return flags
}

// hidden are flags that the generated list omits: kong's, and those that only show a failure.
var hidden = []string{"help", "version", "gating"}

var (
	inline = regexp.MustCompile("`([^`]+)`")
	// separator ends a command of the shell.
	separator = regexp.MustCompile(`\s(?:\|\|?|&&?|;|>>?|2>)(?:\s|$)|;\s|\$\(`)
	longFlag  = regexp.MustCompile(`^\[?--(?:\[?no-\]?)?([a-z0-9][a-z0-9-]*)`)
)

// flagsOfCalls returns the program and the name of each flag in the calls of a text.
func flagsOfCalls(t *testing.T, text string) (found [][2]string) {
	t.Helper()
	programs := programFlags(t)
	for line := range strings.Lines(strings.ReplaceAll(text, "\\\n", " ")) {
		for _, command := range separator.Split(line, -1) {
			words := strings.Fields(command)
			if i := slices.Index(words, "--"); i > 0 && words[0] == "kubectl" {
				words = words[i+1:]
			}
			for len(words) > 0 && (slices.Contains([]string{"sudo", "exec", "kubectl"}, words[0]) ||
				strings.Contains(words[0], "=")) {
				words = words[1:]
			}
			if len(words) > 3 && words[0] == "ip" && words[1] == "netns" && words[2] == "exec" {
				words = words[4:]
			}
			if len(words) == 0 || programs[strings.TrimPrefix(words[0], "bin/")] == nil {
				continue
			}
			program := strings.TrimPrefix(words[0], "bin/")
			for _, word := range words[1:] {
				if m := longFlag.FindStringSubmatch(word); m != nil {
					found = append(found, [2]string{program, m[1]})
				}
			}
		}
	}
	return found
}

// TestFlagsOfDocuments checks the flags in every document, text blocks included: the program of a call
// has them, and a flag without a program belongs to one of them.
func TestFlagsOfDocuments(t *testing.T) {
	flags := programFlags(t)
	all := slices.Clone(hidden)
	for _, list := range flags {
		all = append(all, list...)
	}
	calls, alone := 0, 0
	for _, file := range sources(t) {
		if filepath.Ext(file) != ".md" || file == "CHANGELOG.md" {
			continue
		}
		text, err := os.ReadFile(filepath.Join(root, file))
		harness.Must(t, err)
		blocks, prose := fencedBlocks(string(text))
		type place struct {
			line int
			text string
		}
		var places []place
		for _, b := range blocks {
			if kind, _, _ := strings.Cut(b.info, " "); slices.Contains([]string{"sh", "text", "console", ""}, kind) {
				places = append(places, place{b.line, b.text})
			}
		}
		for i, line := range strings.Split(prose, "\n") {
			for _, m := range inline.FindAllStringSubmatch(line, -1) {
				places = append(places, place{i + 1, m[1]})
				if flag := longFlag.FindStringSubmatch(m[1]); flag != nil && !slices.Contains(foreign[file], flag[1]) {
					alone++
					if !slices.Contains(all, flag[1]) {
						t.Errorf("%s:%d: no program has a flag --%s", file, i+1, flag[1])
					}
				}
			}
		}
		for _, p := range places {
			for _, f := range flagsOfCalls(t, p.text) {
				calls++
				if !slices.Contains(flags[f[0]], f[1]) && !slices.Contains(hidden, f[1]) {
					t.Errorf("%s:%d: %s has no flag --%s", file, p.line, f[0], f[1])
				}
			}
		}
	}
	if calls < 30 || alone < 60 {
		t.Errorf("found only %d flags in calls and %d others", calls, alone)
	}
}

// foreign are flags of tests, or of programs of other projects, that documents name without the
// program.
var foreign = map[string][]string{
	"deployments/README.md":          {"allowed-unsafe-sysctls"},
	"deployments/meridio2/README.md": {"lb-service-account"},
	"docs/proof.md":                  {"kinds"},
}

func TestFlagsOfCalls(t *testing.T) {
	for text, want := range map[string]string{
		"frontend run --a=b --c \\\n  --d":                  "[frontend a] [frontend c] [frontend d]",
		"kubectl -n t exec POD -c lb -- lb status --e | jq": "[lb e]",
		"kubectl logs POD -c lb --since=15m":                "",
		"sudo bin/vipgate-probe run --f && kubectl x --g":   "[vipgate-probe f]",
		"kubectl vipgate status --h":                        "[vipgate h]",
		"alb run --x":                                       "",
	} {
		got := fmt.Sprint(flagsOfCalls(t, text))
		if got != "["+want+"]" {
			t.Errorf("%q: %s, want %s", text, got, want)
		}
	}
}
