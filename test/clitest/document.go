package clitest

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/alecthomas/kong"
	"golang.org/x/sys/unix"
)

// Reference returns the reference of a command line in Markdown: a table of flags for each
// command. Flags that an earlier command also has are only named.
func Reference(k *kong.Kong) string {
	var b strings.Builder
	fmt.Fprintf(&b, "Before any command: `--help`, `--version` and `--debug` (the same as `--log-level=debug`).\n")
	var known []*kong.Flag
	for _, group := range sameFlags(k.Model.Leaves(true)) {
		b.WriteString("\n###")
		for i, c := range group {
			if i > 0 {
				b.WriteByte(',')
			}
			fmt.Fprintf(&b, " `%s`", c.FullPath())
		}
		b.WriteString("\n\n")
		for _, c := range group {
			if len(group) > 1 {
				fmt.Fprintf(&b, "- `%s`: %s\n", usage(c), c.Help)
			} else {
				b.WriteString(wrap(c.Help) + "\n")
			}
		}
		for _, p := range group[0].Positional {
			fmt.Fprintf(&b, "\n`%s`: %s\n", p.Name, p.Help)
		}
		var own []*kong.Flag
		var shared []string
		for _, f := range group[0].Flags {
			if slices.ContainsFunc(known, func(o *kong.Flag) bool { return row(o) == row(f) }) {
				shared = append(shared, "`--"+f.Name+"`")
			} else {
				own = append(own, f)
			}
		}
		if len(shared) > 0 {
			b.WriteString("\n" + wrap("Flags that are explained above: "+strings.Join(shared, ", ")+".") + "\n")
		}
		b.WriteString(tables(own))
		known = append(known, own...)
	}
	return b.String()
}

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

// sameFlags groups commands that have the same flags and arguments.
func sameFlags(leaves []*kong.Node) [][]*kong.Node {
	signature := func(n *kong.Node) string {
		var b strings.Builder
		for _, f := range n.Flags {
			b.WriteString(row(f))
		}
		for _, p := range n.Positional {
			b.WriteString(p.Name + p.Help)
		}
		return b.String()
	}
	var groups [][]*kong.Node
	for _, n := range leaves {
		i := slices.IndexFunc(groups, func(g []*kong.Node) bool { return signature(g[0]) == signature(n) })
		if i < 0 {
			groups = append(groups, []*kong.Node{n})
		} else {
			groups[i] = append(groups[i], n)
		}
	}
	return groups
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
		rows[title] = append(rows[title], row(f))
	}
	var b strings.Builder
	for _, title := range titles {
		if title != "" {
			fmt.Fprintf(&b, "\n**%s**\n", title)
		}
		b.WriteString("\n| Flag | Variable | Default | Meaning |\n|---|---|---|---|\n")
		for _, r := range rows[title] {
			b.WriteString(r)
		}
	}
	return b.String()
}

// row returns the row of a flag.
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
	if f.Short != 0 {
		name = fmt.Sprintf("-%c, %s", f.Short, name)
	}
	variable, value := "", ""
	if len(f.Envs) > 0 {
		variable = "`" + strings.Join(f.Envs, "`, `") + "`"
	}
	switch {
	case f.Default != "":
		value = "`" + f.Default + "`"
	case f.IsBool():
		value = "`false`"
	}
	return fmt.Sprintf("| `%s` | %s | %s | %s |\n", escape(name), variable, escape(value), escape(f.Help))
}

// escape keeps a pipe from ending the cell of a table.
func escape(s string) string { return strings.ReplaceAll(s, "|", `\|`) }

// Section compares the section of a document between the comments <!-- begin NAME --> and
// <!-- end NAME --> with its expected content, and replaces it if update is true. The tests of two
// programs may do that at the same time.
func Section(file, name, content string, update bool) (err error) {
	f, err := os.OpenFile(file, os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("document: %w", err)
	}
	// Closing releases the lock as well.
	defer func() { err = errors.Join(err, f.Close()) }()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("lock %s: %w", file, err)
	}
	data, err := io.ReadAll(f)
	if err != nil {
		return fmt.Errorf("document: %w", err)
	}
	begin, end := "<!-- begin "+name+" -->\n", "<!-- end "+name+" -->"
	before, rest, ok := strings.Cut(string(data), begin)
	if !ok {
		return fmt.Errorf("%s has no line %s", file, strings.TrimSpace(begin))
	}
	old, after, ok := strings.Cut(rest, end)
	if !ok {
		return fmt.Errorf("%s has no line %s", file, end)
	}
	content = "\n" + strings.TrimSpace(content) + "\n\n"
	if old == content {
		return nil
	}
	if !update {
		return fmt.Errorf("%s: the section %q is stale: run make generate", file, name)
	}
	text := before + begin + content + end + after
	if err := f.Truncate(int64(len(text))); err != nil {
		return fmt.Errorf("document: %w", err)
	}
	if _, err := f.WriteAt([]byte(text), 0); err != nil {
		return fmt.Errorf("document: %w", err)
	}
	return nil
}
