package docs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/test/harness"
)

// commandLine is a call of frontend, lb or target in a document.
type commandLine struct {
	at   string // file:line
	args []string
}

// commandLines finds the calls of the programs in the blocks and in the
// inline code of a document.
func commandLines(t *testing.T, d *document) []commandLine {
	t.Helper()
	var found []commandLine
	add := func(number int, text string) {
		for _, words := range calls(text) {
			found = append(found, commandLine{fmt.Sprintf("%s:%d", d.path, number), words})
		}
	}
	for _, b := range d.blocks {
		// In a text block, the screens of programs are not calls.
		if kind, _, _ := strings.Cut(b.info, " "); kind != "sh" && kind != "console" &&
			!(kind == "text" && isCall.MatchString(b.text)) {
			continue
		}
		joined := strings.ReplaceAll(b.text, "\\\n", "  ") // the same number of bytes, in one line
		for i, text := range strings.Split(joined, "\n") {
			add(b.line+1+i, text)
		}
	}
	for _, l := range d.prose {
		for _, c := range code(l.text) {
			// A name without arguments is not a call.
			if strings.Contains(c, " ") {
				add(l.number, c)
			}
		}
	}
	return found
}

// isCall matches a text block whose lines are calls.
var isCall = regexp.MustCompile(`^(?:frontend|lb|target) [a-z-]+ `)

// separators end a command of the shell.
var separators = regexp.MustCompile(`\s(?:\|\|?|&&?|;|>>?|2>)(?:\s|$)|;\s`)

// calls returns the calls of frontend, lb and target in a line of the shell.
func calls(text string) [][]string {
	programs := []string{"frontend", "lb", "target"}
	var found [][]string
	for _, command := range separators.Split(text, -1) {
		words := split(command)
		// A call may be preceded by variables and by programs that run another program.
		if i := slices.Index(words, "--"); i > 0 && words[0] == "kubectl" {
			words = words[i+1:]
		}
		for len(words) > 0 && (words[0] == "sudo" || words[0] == "exec" || strings.Contains(words[0], "=")) {
			words = words[1:]
		}
		if len(words) > 3 && words[0] == "ip" && words[1] == "netns" && words[2] == "exec" {
			words = words[4:]
		}
		if len(words) > 0 && slices.Contains(programs, strings.TrimPrefix(words[0], "bin/")) {
			words[0] = filepath.Base(words[0])
			found = append(found, words)
		}
	}
	return found
}

// split splits a command into words as a shell does, with quotes but without expansions. A
// comment ends it.
func split(command string) []string {
	var words []string
	var word strings.Builder
	quote, inWord := rune(0), false
	for _, r := range command {
		switch {
		case quote != 0 && r == quote:
			quote = 0
		case quote != 0:
			word.WriteRune(r)
		case r == '\'' || r == '"':
			quote, inWord = r, true
		case r == '#' && !inWord:
			return words
		case r == ' ' || r == '\t':
			if inWord {
				words = append(words, word.String())
			}
			word.Reset()
			inWord = false
		default:
			word.WriteRune(r)
			inWord = true
		}
	}
	if inWord {
		words = append(words, word.String())
	}
	return words
}

// help runs a program with --help on a command line. It fails if the program does not accept the
// command, a flag, or the number of arguments.
func help(ctx context.Context, args []string) (string, error) {
	words := append(slices.Clone(args[1:]), "--help")
	out, err := exec.CommandContext(ctx, filepath.Join(binaries, args[0]), words...).CombinedOutput()
	if err != nil {
		return "", errors.New(strings.TrimSpace(string(out)))
	}
	return string(out), nil
}

func TestCommandLinesParse(t *testing.T) {
	checked := map[string]bool{}
	for _, d := range documents(t) {
		for _, c := range commandLines(t, d) {
			line := strings.Join(c.args, " ")
			if checked[line] {
				continue
			}
			checked[line] = true
			if _, err := help(t.Context(), c.args); err != nil {
				t.Errorf("%s: %s: %v", c.at, line, err)
			}
		}
	}
	if len(checked) < 20 {
		t.Errorf("only %d command lines were found", len(checked))
	}
}

var (
	commandPattern  = regexp.MustCompile(`(?m)^  ([a-z]+(?: [a-z]+)?) `)
	helpFlagPattern = regexp.MustCompile(`--(?:\[no-\])?([a-z0-9-]+)`)
	variablePattern = regexp.MustCompile(`VIPGATE_[A-Z0-9_]*[A-Z0-9]`)
)

// flags returns the flags and variables of all programs, with every command.
func flags(t *testing.T) (flags, variables map[string]bool) {
	t.Helper()
	flags, variables = map[string]bool{}, map[string]bool{}
	for _, program := range []string{"frontend", "lb", "target"} {
		overview, err := help(t.Context(), []string{program})
		harness.Must(t, err)
		commands := commandPattern.FindAllStringSubmatch(overview, -1)
		if len(commands) < 4 {
			t.Fatalf("%s has only the commands %v:\n%s", program, commands, overview)
		}
		for _, c := range commands {
			text, err := help(t.Context(), append([]string{program}, strings.Fields(c[1])...))
			harness.Must(t, err)
			for _, m := range helpFlagPattern.FindAllStringSubmatch(text, -1) {
				flags[m[1]] = true
			}
			for _, v := range variablePattern.FindAllString(text, -1) {
				variables[v] = true
			}
		}
	}
	// kube and meridio-frontend are not built here: most of their flags have variables.
	names, err := os.ReadFile(filepath.Join(root, "cmd/internal/cli/variables.txt"))
	harness.Must(t, err)
	for _, v := range variablePattern.FindAllString(string(names), -1) {
		variables[v] = true
		flags[strings.ToLower(strings.ReplaceAll(strings.TrimPrefix(v, "VIPGATE_"), "_", "-"))] = true
	}
	return flags, variables
}

func TestFlagsAndVariablesExist(t *testing.T) {
	flags, variables := flags(t)
	mentioned := 0
	for _, name := range []string{
		"README.md", "docs/architecture.md", "docs/bird.md", "docs/configuration.md", "docs/dataplane.md",
		"docs/gateways.md", "docs/kubernetes.md", "docs/meridio.md", "docs/meridio2.md", "docs/operations.md",
		"docs/reference.md", "docs/targets.md",
	} {
		d := read(t, filepath.Join(root, name))
		for _, l := range d.prose {
			for _, c := range code(l.text) {
				if m := helpFlagPattern.FindStringSubmatchIndex(c); m != nil && m[0] == 0 {
					mentioned++
					if flag := c[m[2]:m[3]]; !flags[flag] && !flags[strings.TrimPrefix(flag, "no-")] {
						t.Errorf("%s:%d: no command has a flag --%s", d.path, l.number, flag)
					}
				}
			}
		}
		for _, l := range d.everyLine() {
			for _, v := range variablePattern.FindAllString(l.text, -1) {
				if !variables[v] {
					t.Errorf("%s:%d: no flag has a variable %s", d.path, l.number, v)
				}
			}
		}
	}
	if mentioned < 15 {
		t.Errorf("only %d flags were found", mentioned)
	}
}

// TestUntestedCommandsAreMarked checks that every block of commands is run by a test, or its info
// string names its requirement, such as "sh needs=cluster".
func TestUntestedCommandsAreMarked(t *testing.T) {
	marked := regexp.MustCompile(`^sh (?:run-by-test|template=|needs=[a-z]+$)`)
	blocks := 0
	for _, d := range documents(t) {
		for _, b := range d.blocks {
			if b.info != "sh" && !strings.HasPrefix(b.info, "sh ") && b.info != "bash" && b.info != "console" {
				continue
			}
			blocks++
			if !marked.MatchString(b.info) {
				t.Errorf("%s:%d: no test runs this block of commands, and needs=… does not name the reason", d.path, b.line)
			}
		}
	}
	if blocks < 50 {
		t.Errorf("found only %d blocks of commands", blocks)
	}
}

func TestCallsInShellLines(t *testing.T) {
	for _, tt := range []struct {
		line string
		want string
	}{
		{"frontend status", "frontend status"},
		{"  bin/frontend status --admin-socket=… --watch", "frontend status --admin-socket=… --watch"},
		{"kubectl -n t exec POD -c lb -- lb status -o json | jq .vips", "lb status -o json"},
		{"ip netns exec NS frontend events --limit=5 # the last", "frontend events --limit=5"},
		{"VIPGATE_DEBUG=1 frontend debug && lb status", "frontend debug,lb status"},
		{
			"frontend drain '20.0.0.1/32' \"2000::1/128\"; frontend undrain",
			"frontend drain 20.0.0.1/32 2000::1/128,frontend undrain",
		},
		{"kubectl logs POD -c lb --since=15m", ""},
		{"tail -f lb log", ""},
	} {
		var got []string
		for _, words := range calls(tt.line) {
			got = append(got, strings.Join(words, " "))
		}
		if strings.Join(got, ",") != tt.want {
			t.Errorf("%q: got %q, want %q", tt.line, strings.Join(got, ","), tt.want)
		}
	}
}
