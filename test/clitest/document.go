package clitest

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/alecthomas/kong"

	"github.com/vipgate/vipgate/test/generated"
	"github.com/vipgate/vipgate/test/harness"
)

var update = flag.Bool("update", false, "write the generated texts instead of comparing them")

// Texts compares the generated texts of a program with its command line: the tables in
// docs/configuration.md unless the program has its own document, the variables that it reads, and
// the names of its flags, which test/style counts. The test runs in cmd/NAME.
func Texts(t *testing.T, name string, documented bool, k *kong.Kong, variables []string) {
	t.Helper()
	if *pages != "" {
		harness.Must(t, WritePages(*pages, installed(name), k))
	}
	if documented {
		harness.Check(t, Flags("../../docs/configuration.md", name, k, *update))
	}
	var flags []string
	_ = kong.Visit(k.Model, func(node kong.Visitable, next kong.Next) error { // no visit fails
		if f, ok := node.(*kong.Flag); ok && f.Name != "help" && f.Name != "version" && !f.Hidden {
			flags = append(flags, f.Name)
		}
		return next(nil)
	})
	slices.Sort(flags)
	for file, lines := range map[string][]string{
		"../internal/cli/variables.txt": variables, "../../test/style/testdata/flags.txt": slices.Compact(flags),
	} {
		GeneratedSection(t, file, name, strings.Join(lines, "\n"))
	}
}

// GeneratedSection is [generated.Section] with the flag -update of the test.
func GeneratedSection(t *testing.T, file, name, content string) {
	t.Helper()
	harness.Check(t, generated.Section(file, name, content, *update))
}

// Flags compares the section NAME of a document with the reference of a command line, as
// [generated.Section] does: tables of the flags of the first command, and a list of all commands.
// Flags that the document explains above the section are only named.
func Flags(file, name string, k *kong.Kong, update bool) error {
	data, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("document: %w", err)
	}
	above, _, _ := strings.Cut(string(data), generated.Begin(name))
	return generated.Section(file, name, flagReference(above, k), update)
}

// flagReference returns the reference of a command line for a document with this text above it.
func flagReference(above string, k *kong.Kong) string {
	commands := k.Model.Leaves(true)
	var shared []string
	var own []*kong.Flag
	for _, f := range commands[0].Flags {
		if strings.Contains(above, row(f)) {
			shared = append(shared, "`--"+f.Name+"`")
		} else {
			own = append(own, f)
		}
	}
	var b strings.Builder
	b.WriteString(tables(own))
	if len(shared) > 0 {
		b.WriteString("\n" + wrap("As above: "+strings.Join(shared, ", ")+".") + "\n")
	}
	b.WriteString("\n**Commands**, whose flags `--help` lists\n\n")
	for _, c := range commands {
		b.WriteString(strings.ReplaceAll(wrap("- `"+usage(c)+"`: "+c.Help), "\n", "\n  ") + "\n")
	}
	return b.String()
}

// head begins a table of flags.
const head = "| Flag | Default | Meaning |\n|---|---|---|\n"

// wrap breaks a paragraph into lines of at most 100 columns.
func wrap(text string) string {
	var b strings.Builder
	column := 0
	for word := range strings.FieldsSeq(text) {
		if column > 0 && column+1+len(word) > 100 {
			b.WriteByte('\n')
			column = 0
		} else if column > 0 {
			b.WriteByte(' ')
			column++
		}
		b.WriteString(word)
		column += len(word)
	}
	return b.String()
}

func usage(n *kong.Node) string {
	s := n.FullPath()
	for _, p := range n.Positional {
		s += " " + p.Summary()
	}
	return s
}

// tables returns a table for each group of flags, in their order.
func tables(flags []*kong.Flag) string {
	var titles []string
	rows := map[string][]string{}
	for _, f := range flags {
		title := ""
		if f.Group != nil {
			title = f.Group.Title
		}
		if len(rows[title]) == 0 {
			titles = append(titles, title)
		}
		rows[title] = append(rows[title], "| `"+row(f))
	}
	var b strings.Builder
	for _, title := range titles {
		if title != "" {
			fmt.Fprintf(&b, "\n**%s**\n", title)
		}
		b.WriteString("\n" + head)
		for _, r := range rows[title] {
			b.WriteString(r)
		}
	}
	return b.String()
}

// row returns the row of a flag without its beginning. A variable is named only if its name does
// not follow from the name of the flag.
func row(f *kong.Flag) string {
	name := "--" + f.Name
	switch {
	case f.IsBool() && f.Tag.Negatable != "":
		name = "--[no-]" + f.Name
	case !f.IsBool():
		placeholder := f.PlaceHolder
		if placeholder == "" {
			placeholder = strings.ToUpper(f.Target.Type().Name())
		}
		if f.Enum != "" {
			placeholder = strings.ReplaceAll(f.Enum, ",", "|")
		}
		name += "=" + placeholder
	}
	value, short, variable := "", "", ""
	if f.Default != "" {
		value = "`" + f.Default + "`"
	}
	if f.Short != 0 {
		short = fmt.Sprintf(" (`-%c`)", f.Short)
	}
	switch {
	case len(f.Envs) == 0:
		variable = " (No variable.)"
	case len(f.Envs) > 1 || f.Envs[0] != "VIPGATE_"+strings.ToUpper(strings.ReplaceAll(f.Name, "-", "_")):
		variable = " (" + strings.Join(f.Envs, ", ") + ")"
	}
	return fmt.Sprintf("%s`%s | %s | %s |\n", escape(name), short, escape(value), escape(f.Help)+variable)
}

// escape keeps a pipe from ending the cell of a table.
func escape(s string) string { return strings.ReplaceAll(s, "|", `\|`) }
