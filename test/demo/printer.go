package main

import (
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/vipgate/vipgate/test/lab"
)

// printer prints. The first error of the output is kept in err.
type printer struct {
	w   io.Writer
	err error
}

// printf prints a line.
func (t *printer) printf(format string, args ...any) {
	if t.err != nil {
		return
	}
	if _, err := fmt.Fprintf(t.w, format+"\n", args...); err != nil {
		t.err = fmt.Errorf("print: %w", err)
	}
}

// quote prints the output of another program.
func (t *printer) quote(text string) {
	for line := range strings.Lines(text) {
		t.printf("      | %s", strings.TrimRight(line, "\n"))
	}
}

// show prints the gateway's table: + is new since before, - is gone, ~ changed.
func (t *printer) show(before, now lab.Snapshot) {
	for _, line := range table(before, now) {
		t.printf("      %s", line)
	}
}

// table renders a gateway's table, by prefix.
func table(before, now lab.Snapshot) []string {
	all := append(now.Prefixes(), before.Prefixes()...)
	slices.SortFunc(all, netip.Prefix.Compare)
	all = slices.Compact(all)
	lines := []string{row(" ", "prefix", "via", "AS path", "community")}
	if len(now.Routes) == 0 {
		lines[0] = "  the gateway's table is empty"
	}
	for _, p := range all {
		was, had := before.Routes[p]
		is, has := now.Routes[p]
		mark := " "
		switch {
		case !has:
			lines = append(lines, row("-", p.String(), "gone", "", ""))
			continue
		case !had:
			mark = "+"
		case !was.Equal(is):
			mark = "~"
		}
		lines = append(lines, row(mark, p.String(), is.NextHop.String(), strings.Join(is.ASPath, " "), communities(is)))
	}
	return lines
}

func row(mark, prefix, via, path, community string) string {
	return strings.TrimRight(fmt.Sprintf("%s %-13s  %-14s  %-20s  %s", mark, prefix, via, path, community), " ")
}

// communities formats the communities as in the RFCs.
func communities(r lab.Route) string {
	if len(r.Communities) == 0 {
		return "-"
	}
	var list []string
	for _, c := range r.Communities {
		c = strings.ReplaceAll(strings.Trim(c, "()"), ",", ":")
		if c == "65535:0" {
			c += " (graceful shutdown)"
		}
		list = append(list, c)
	}
	return strings.Join(list, " ")
}

// list names prefixes in a sentence.
func list(prefixes []netip.Prefix) string {
	if len(prefixes) == 0 {
		return "nothing"
	}
	var words []string
	for _, p := range prefixes {
		words = append(words, p.String())
	}
	return strings.Join(words, ", ")
}

// short formats a duration for output.
func short(d time.Duration) string {
	switch {
	case d < 10*time.Millisecond:
		return fmt.Sprintf("%.1f ms", float64(d)/float64(time.Millisecond))
	case d < time.Second:
		return fmt.Sprintf("%d ms", d.Milliseconds())
	default:
		return fmt.Sprintf("%.1f s", d.Seconds())
	}
}
