package main

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/vipgate/vipgate/test/generated"
)

// section is the name of the generated part of docs/performance.md.
const section = "bench"

// shown is a measurement in the table of docs/performance.md, which also has each one that misses
// its goal.
type shown struct {
	row    int
	what   string // as measured
	n      int
	method string // vipgate if empty
	label  string // in place of what
	// against is the method in the column of the reference; reference if empty.
	against string
	never   bool // the reference never does it
}

// table lists the measurements in the order in which the document has them.
var table = []shown{
	{row: 1, what: oneFlips, n: 1},
	{row: 1, what: oneFlips, n: 50_000, label: "the same"},
	{row: 2, what: allDown, n: 10_000},
	{row: 2, what: allUp, n: 10_000},
	{row: 3, what: "lb kill -9 → last withdraw", n: 1000},
	{row: 3, what: "lb kill -9, --dataplane=nftables → last withdraw", n: 1000},
	{row: 4, what: "frontend kill -9 → last withdraw", n: 1000, never: true},
	{row: 4, what: externalKill, n: externalVIPs},
	{row: 5, what: "gateway resets the session → Egress NOT_SERVING", n: 1, label: "session reset → Egress NOT_SERVING"},
	{
		row: 6, what: "session Established → all at the gateway", n: 10_000,
		label: "session up → all VIPs at the gateway",
	},
	{
		row: 7, what: "start of lb and frontend → all VIPs at the gateway", n: 10_000,
		label: "start → all VIPs at the gateway",
	},
	{row: 7, what: earlyStarts, n: 1},
	{row: 7, what: unnumberedStart + ", BIRD", n: unnumberedVIPs},
	{row: 7, what: unnumberedStart + ", FRR", n: unnumberedVIPs},
	{
		row: 8, what: "gateway gone (carrier lost for 2 s), back → all VIPs there; time 3 in a row", n: 100,
		label: "carrier lost for 2 s, third time in a row → VIPs",
	},
	{
		row: 9, what: "all flip every 20 ms for 20s → right state", n: 1000,
		label: "flips every 20 ms for 20 s → right state",
	},
	{row: 10, what: "SIGTERM to both → exit of both", n: 10_000},
	{row: 10, what: unreadLog, n: 1},
	{
		row: 11, what: "decision in the LB → the last of 10 watchers has it", n: 1000,
		label: "decision → the last of 10 watchers",
	},
	{
		row: 12, what: "lb + frontend + BIRD, idle: share of one core", n: 1,
		label: "lb + frontend + BIRD, idle: share of a core",
	},
	{
		row: 13, what: "VIP traffic: time per packet ÷ that without any VIP", n: 10_000,
		label: "VIP traffic: time per packet ÷ without VIPs",
	},
	{row: 13, what: "VIP traffic: one core's time per packet", n: 10_000, label: "VIP traffic: time per packet"},
	{
		row: 14, what: "targets checked each second: share of one core", n: 10_000,
		label: "TCP checks each second: share of a core",
	},
	{row: 14, what: checksOf + "UDP: to TCP", n: 1000, label: "UDP checks: processor time ÷ TCP"},
	{row: 14, what: checksOf + "DNS: to TCP", n: 1000, label: "DNS checks: processor time ÷ TCP"},
	{row: 15, what: "Register (mTLS) → UPDATE", n: 1000},
	{row: 17, what: "one target drains → confirmed", n: 1000},
	{row: 17, what: "one target comes → confirmed", n: 1000},
	{row: 18, what: forwardRatio, n: 10, label: "time per packet ÷ plain forwarding"},
	{row: 18, what: forwardRatio, n: 10, method: "vipgate, --conntrack=loose", label: "the same, `--conntrack=loose`"},
	{row: 18, what: forwardRatio, n: 10, method: "vipgate, --conntrack=off", label: "the same, `--conntrack=off`"},
	{row: 18, what: forwardRatio, n: 10, method: "vipgate, fast path", label: "the same, fast path"},
	{row: 19, what: "a stream comes → confirmed", n: 1009},
	{row: 19, what: "a stream comes → confirmed", n: 65_537},
	{row: 20, what: "readiness of a Pod changes → trench file", n: 500},
	{row: 20, what: "kube: peak resident memory", n: 500},
	{
		row: 21, what: "time per request and reply ÷ that of one return route", n: 200,
		label: "`target`: time per reply ÷ one return route", against: replyRules,
	},
	{row: 22, what: allDown, n: 10_000, method: viaMeridio, against: viaFile, label: "Meridio: " + allDown},
	{
		row: 23, what: "LB SIGSTOP → last withdraw", n: 10_000, method: viaMeridio, against: viaFile,
		label: "Meridio: LB SIGSTOP → last withdraw",
	},
	{
		row: 24, what: "gateway resets the session → the NSP receives Unregister", n: 1, method: viaMeridio,
		label: "Meridio: session reset → Unregister",
	},
	{
		row: 25, what: "start of lb and frontend → all VIPs at the gateway", n: 10_000, method: viaMeridio,
		against: viaFile, label: "Meridio: start → all VIPs at the gateway",
	},
	{
		row: 26, what: "the list has one VIP more → UPDATE", n: 10_000, method: viaMeridio, against: viaFile,
		label: "Meridio: the list has one VIP more → UPDATE",
	},
}

// is reports whether a line has the measurement.
func (s shown) is(l line) bool {
	method := s.method
	if method == "" {
		method = vipgate
	}
	return l.row == s.row && l.what == s.what && l.n == strconv.Itoa(s.n) && l.method == method
}

// title returns the cell of the measurement.
func (s shown) title() string {
	label := s.what
	if s.label != "" {
		label = s.label
	}
	return strings.NewReplacer("kill -9", "`kill -9`", "resident memory", "memory").Replace(label)
}

// values returns the median, the 99th percentile if it differs, and the unit.
func (l line) values() string {
	text := l.median
	if l.p99 != l.median && l.unit != "MiB" && l.unit != "%" {
		text += "/" + l.p99
	}
	return text + " " + l.unit
}

// markdown returns the row of the table for a measurement, which the results may lack.
func (s shown) markdown(lines []line) string {
	title, cell, other := s.title(), "not measured", ""
	if at := slices.IndexFunc(lines, s.is); at >= 0 {
		cell = lines[at].values()
		if missed := lines[at].missed; missed != "" {
			title += " (" + strings.NewReplacer("median ", "", "max ", "").Replace(missed) + ")"
			cell = "**" + cell + "**"
		}
	}
	if s.never {
		other = "never"
	}
	against := shown{row: s.row, what: s.what, n: s.n, method: reference}
	if s.against != "" {
		against.method = s.against
	}
	if at := slices.IndexFunc(lines, against.is); at >= 0 {
		other = lines[at].median + " " + lines[at].unit
	}
	return fmt.Sprintf("|%d|%s|%d|%s|%s|\n", s.row, title, s.n, cell, other)
}

// inTable returns the table's measurements and, after those of their rows, all others that miss a
// goal.
func inTable(lines []line) []shown {
	all := slices.Clone(table)
	for _, l := range lines {
		if l.missed == "" || slices.ContainsFunc(table, func(s shown) bool { return s.is(l) }) {
			continue
		}
		n, _ := strconv.Atoi(l.n) // 0 if the result does not depend on it
		s := shown{row: l.row, what: l.what, n: n, method: l.method, label: l.what}
		if l.method != vipgate {
			s.label += ", " + strings.TrimPrefix(l.method, vipgate+", ")
		}
		all = append(all, s)
	}
	slices.SortStableFunc(all, func(a, b shown) int { return a.row - b.row })
	return all
}

// markdown returns the generated part of the document: the runs and the table.
func markdown(lines []line) string {
	var b strings.Builder
	var runs []string
	rows := map[string][]string{}
	for _, l := range lines {
		if !slices.Contains(runs, l.run()) {
			runs = append(runs, l.run())
		}
		if row := strconv.Itoa(l.row); !slices.Contains(rows[l.run()], row) {
			rows[l.run()] = append(rows[l.run()], row)
		}
	}
	for i, run := range runs {
		if i == 0 {
			b.WriteString("- All rows: " + run + ".\n")
		} else {
			b.WriteString("- But rows " + strings.Join(rows[run], ", ") + ":\n  " + run + ".\n")
		}
	}
	b.WriteString("\n|#|what|N|vipgate|reference|\n|---|---|---|---|---|\n")
	for _, s := range inTable(lines) {
		b.WriteString(s.markdown(lines))
	}
	return b.String()
}

// updateDocument writes the table of the results in a CSV file into a document.
func updateDocument(document, results string, update bool) error {
	lines, err := readCSV(results)
	if err != nil {
		return err
	}
	return generated.Section(document, section, markdown(lines), update)
}
