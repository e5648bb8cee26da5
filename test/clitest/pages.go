package clitest

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/alecthomas/kong"
)

// pages is set by tools/release: the pages of a release come from the same model as the documents.
var pages = flag.String("pages", "", "directory for the manual and the completions of the program")

// WritePages writes the manual, NAME.1, and the completions, NAME.bash, _NAME and NAME.fish, of a
// program that is installed as name.
func WritePages(dir, name string, k *kong.Kong) error {
	return errors.Join(os.MkdirAll(dir, 0o755),
		os.WriteFile(filepath.Join(dir, name+".1"), []byte(manual(name, k)), 0o644),
		os.WriteFile(filepath.Join(dir, name+".bash"), []byte(bash(name, k)), 0o644),
		os.WriteFile(filepath.Join(dir, "_"+name), []byte(zsh(name, k)), 0o644),
		os.WriteFile(filepath.Join(dir, name+".fish"), []byte(fish(name, k)), 0o644))
}

// installed returns the name of a program in /usr/bin.
func installed(name string) string {
	if strings.HasPrefix(name, "vipgate") {
		return name
	}
	return "vipgate-" + name
}

// visible returns the nodes that a user may type, the program first, and the words of each.
func visible(k *kong.Kong) (nodes []*kong.Node, words map[*kong.Node][]string) {
	words = map[*kong.Node][]string{}
	var add func(n *kong.Node, path []string)
	add = func(n *kong.Node, path []string) {
		nodes, words[n] = append(nodes, n), path
		for _, child := range n.Children {
			if !child.Hidden && child.Type == kong.CommandNode {
				add(child, append(path[:len(path):len(path)], child.Name))
			}
		}
	}
	add(k.Model.Node, nil)
	return nodes, words
}

// options lists the commands and flags after the words of a node.
func options(n *kong.Node) (commands []string, flags []*kong.Flag) {
	for _, child := range n.Children {
		if !child.Hidden && child.Type == kong.CommandNode {
			commands = append(commands, child.Name)
		}
	}
	for _, f := range n.Flags {
		if !f.Hidden {
			flags = append(flags, f)
		}
	}
	return commands, flags
}

// cases returns the patterns of a shell's case statement: the paths of commands, and the candidates
// of each, of which line makes a branch.
func cases(k *kong.Kong, line string) (paths, branches string) {
	nodes, words := visible(k)
	var all []string
	var text strings.Builder
	for _, n := range nodes {
		path := strings.Join(words[n], " ")
		if path != "" {
			all = append(all, fmt.Sprintf("%q", " "+path))
			path = " " + path
		}
		candidates, flags := options(n)
		for _, f := range flags {
			candidates = append(candidates, "--"+f.Name)
		}
		fmt.Fprintf(&text, "\t%q) %s ;;\n", path, fmt.Sprintf(line, strings.Join(candidates, " ")))
	}
	return strings.Join(all, " | "), text.String()
}

func bash(name string, k *kong.Kong) string {
	function := "_" + strings.ReplaceAll(name, "-", "_")
	paths, branches := cases(k, `candidates="%s"`)
	return fmt.Sprintf(`%s() {
	local word place= candidates=
	for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
		case "$place $word" in %s) place="$place $word" ;; esac
	done
	case "$place" in
%s	esac
	COMPREPLY=($(compgen -W "$candidates" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F %[1]s %[4]s
`, function, paths, branches, name)
}

func zsh(name string, k *kong.Kong) string {
	paths, branches := cases(k, "compadd -- %s")
	return fmt.Sprintf(`#compdef %s
local word place=
for word in ${words[2,CURRENT-1]}; do
	case "$place $word" in %s) place="$place $word" ;; esac
done
case "$place" in
%sesac
_files
`, name, paths, branches)
}

func fish(name string, k *kong.Kong) string {
	nodes, words := visible(k)
	var text strings.Builder
	for _, n := range nodes {
		condition := "__fish_use_subcommand"
		for i, word := range words[n] {
			if i == 0 {
				condition = ""
			} else {
				condition += "; and "
			}
			condition += "__fish_seen_subcommand_from " + word
		}
		for _, child := range n.Children {
			if !child.Hidden && child.Type == kong.CommandNode {
				fmt.Fprintf(&text, "complete -c %s -f -n '%s' -a %s -d '%s'\n", name, condition, child.Name, quoted(child.Help))
			}
		}
		_, flags := options(n)
		for _, f := range flags {
			fmt.Fprintf(&text, "complete -c %s -n '%s' -l %s -d '%s'\n", name, condition, f.Name, quoted(f.Help))
		}
	}
	return text.String()
}

// quoted escapes a text between single quotes of fish.
func quoted(text string) string { return strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(text) }

// manual returns a page of section 1.
func manual(name string, k *kong.Kong) string {
	nodes, words := visible(k)
	var text strings.Builder
	fmt.Fprintf(&text, ".TH %s 1\n.SH NAME\n%s \\- part of vipgate\n", strings.ToUpper(name), name)
	fmt.Fprintf(&text, ".SH SYNOPSIS\n.B %s\nCOMMAND [FLAGS]\n.SH DESCRIPTION\n%s\n", name, roff(k.Model.Help))
	text.WriteString("Each flag has a variable: VIPGATE_TRENCH_FILE for \\-\\-trench\\-file.\n.SH COMMANDS\n")
	for _, n := range nodes[1:] {
		if !n.Leaf() {
			continue
		}
		usage := strings.Join(words[n], " ")
		for _, p := range n.Positional {
			usage += " " + p.Summary()
		}
		fmt.Fprintf(&text, ".SS %s\n%s\n", roff(usage), roff(n.Help))
		for _, f := range n.Flags {
			if !f.Hidden {
				fmt.Fprintf(&text, ".TP\n.B %s\n%s\n", roff(f.String()), roff(f.Help))
			}
		}
	}
	text.WriteString(".SH SEE ALSO\nhttps://github.com/vipgate/vipgate/tree/main/docs\n")
	return text.String()
}

// roff escapes a text; a line must not begin with a control character.
func roff(text string) string {
	text = strings.NewReplacer(`\`, `\e`, "-", `\-`).Replace(text)
	if strings.HasPrefix(text, ".") || strings.HasPrefix(text, "'") {
		text = `\&` + text
	}
	return text
}
