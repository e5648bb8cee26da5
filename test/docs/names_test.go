package docs

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v4"
	"google.golang.org/grpc/codes"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/frontend"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/metrics"
	"github.com/vipgate/vipgate/pkg/probe"
	"github.com/vipgate/vipgate/pkg/process"
	"github.com/vipgate/vipgate/pkg/status"
	"github.com/vipgate/vipgate/test/clitest"
	"github.com/vipgate/vipgate/test/harness"
)

// known returns the metrics by the names that queries can use.
func known() map[string]metrics.Metric {
	all := map[string]metrics.Metric{}
	for _, m := range metrics.All() {
		all[m.Name] = m
		if m.Type == metrics.Histogram {
			for _, suffix := range []string{"_bucket", "_sum", "_count"} {
				all[m.Name+suffix] = m
			}
		}
	}
	return all
}

// TestMetricsAreListed compares the list of metrics in the reference with the programs. What each
// metric means is in its HELP line at /metrics.
func TestMetricsAreListed(t *testing.T) {
	programs := []struct{ title, prefix string }{
		{"All programs (and `go_*`, `process_*`)", ""},
		{"Frontend, port 2224", "vipgate_frontend_"},
		{"Load balancer, port 2223", "vipgate_lb_"},
		{"Kube, port 2225", "vipgate_kube_"},
		{"Target, port 2226", "vipgate_target_"},
		{"vipgate-probe, port 2227", "vipgate_probe_"},
	}
	listed := map[string][]string{}
	for _, m := range metrics.All() {
		if m.Help == "" {
			t.Errorf("%s has no help", m.Name)
		}
		title := programs[0].title
		for _, p := range programs[1:] {
			if strings.HasPrefix(m.Name, p.prefix) {
				title = p.title
			}
		}
		labels := ""
		if len(m.Labels) > 0 {
			labels = "{" + strings.Join(m.Labels, ",") + "}"
		}
		key := title + string(m.Type)
		listed[key] = append(listed[key], "`"+m.Name+labels+"`")
	}
	var b strings.Builder
	for _, p := range programs {
		fmt.Fprintf(&b, "**%s**\n\n", p.title)
		for _, kind := range []metrics.Type{metrics.Gauge, metrics.Counter, metrics.Histogram} {
			if names := listed[p.title+string(kind)]; len(names) > 0 {
				fmt.Fprintf(&b, "- %s:\n  %s\n", kind, strings.Join(names, ",\n  "))
			}
		}
		b.WriteString("\n")
	}
	clitest.GeneratedSection(t, reference(t).path, "metrics", b.String())
}

var metricPattern = regexp.MustCompile(`\b(?:vipgate|grpc_server)_[a-z0-9_]*[a-z0-9]\b`)

func TestMentionedMetricsExist(t *testing.T) {
	exists := known()
	for _, d := range documents(t) {
		for _, l := range d.everyLine() {
			for _, name := range metricPattern.FindAllString(l.text, -1) {
				if _, ok := exists[name]; !ok {
					t.Errorf("%s:%d: there is no metric %s", d.path, l.number, name)
				}
			}
		}
	}
}

// everyLine returns the lines of the prose and of the blocks.
func (d *document) everyLine() []line {
	all := slices.Clone(d.prose)
	for _, b := range d.blocks {
		for i, text := range strings.Split(b.text, "\n") {
			all = append(all, line{b.line + 1 + i, text})
		}
	}
	return all
}

var (
	selectorPattern = regexp.MustCompile(`((?:vipgate|grpc_server)_[a-z0-9_]+)\{([^}]*)\}`)
	matcherPattern  = regexp.MustCompile(`([a-z_]+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"`)
)

// runbook is the address of the first aid.
const runbook = "https://github.com/vipgate/vipgate/blob/main/docs/operations.md#"

var templatePattern = regexp.MustCompile(`\{\{ \$labels\.([a-z]+) \}\}`)

// wantCommand fails unless the description of an alert has a command, and the programs accept each.
func wantCommand(t *testing.T, alert, description string) {
	t.Helper()
	values := map[string]string{"vip": "20.0.0.1", "container": "frontend"}
	commands := 0
	for _, text := range code(templatePattern.ReplaceAllStringFunc(description, func(template string) string {
		name := templatePattern.FindStringSubmatch(template)[1]
		if value, is := values[name]; is {
			return value
		}
		return name
	})) {
		if strings.HasPrefix(text, "kubectl ") {
			commands++
		}
		for _, args := range calls(text) {
			if _, err := help(t.Context(), args); err != nil {
				t.Errorf("%s: %s: %v", alert, text, err)
			}
		}
	}
	if commands == 0 {
		t.Errorf("%s: no command to type in %q", alert, description)
	}
}

// TestAlertQueries checks metrics, labels and values; promtool tests the results of the queries.
func TestAlertQueries(t *testing.T) {
	var rules struct {
		Spec struct {
			Groups []struct {
				Rules []struct {
					Alert, Expr, For    string
					Labels, Annotations map[string]string
				}
			}
		}
	}
	text, err := os.ReadFile(filepath.Join(root, "deployments/components/monitoring/prometheusrule.yaml"))
	harness.Must(t, err)
	harness.Must(t, yaml.Unmarshal(text, &rules))
	if len(rules.Spec.Groups) != 1 || len(rules.Spec.Groups[0].Rules) < 5 {
		t.Fatalf("no rules found: %+v", rules)
	}
	values := map[string]map[string]bool{
		"service": set(slices.Concat(documentedServices(t, frontendServices), documentedServices(t, lbServices),
			documentedServices(t, kubeServices))...),
		"program": set("frontend"),
		"to":      set(gate.Withdrawn.String(), gate.Depreferred.String(), gate.Announced.String()),
		"reason":  {},
		"state":   {},

		"grpc_service": set(readinessv1.ReadinessService_ServiceDesc.ServiceName),
		"grpc_code":    set(codes.PermissionDenied.String()),
	}
	for r := gate.NotConfigured; r <= gate.Ready; r++ {
		values["reason"][r.String()] = true
	}
	for s := healthcheck.Starting; s <= healthcheck.Drained; s++ {
		values["state"][strings.ReplaceAll(s.String(), " ", "_")] = true
	}
	values["state"][probe.Unknown.String()] = true
	exists, headings := known(), operations(t).anchors()
	for _, r := range rules.Spec.Groups[0].Rules {
		anchor, is := strings.CutPrefix(r.Annotations["runbook_url"], runbook)
		if !is || !headings[anchor] {
			t.Errorf("%s: no heading of the first aid is at %q", r.Alert, r.Annotations["runbook_url"])
		}
		wantCommand(t, r.Alert, r.Annotations["description"])
		ofProject := metricPattern.MatchString(r.Expr) || strings.HasPrefix(r.Expr, "up{")
		if r.Alert == "" || r.Labels["severity"] == "" || !ofProject {
			t.Errorf("rule %+v is not complete", r)
		}
		for _, selector := range selectorPattern.FindAllStringSubmatch(r.Expr, -1) {
			for _, m := range matcherPattern.FindAllStringSubmatch(selector[2], -1) {
				if !slices.Contains(exists[selector[1]].Labels, m[1]) {
					t.Errorf("%s: %s has no label %s", r.Alert, selector[1], m[1])
				}
				for _, v := range strings.Split(m[2], "|") {
					if !values[m[1]][v] {
						t.Errorf("%s: %s is never %q", r.Alert, m[1], v)
					}
				}
			}
		}
	}
}

func set(words ...string) map[string]bool {
	s := map[string]bool{}
	for _, w := range words {
		s[w] = true
	}
	return s
}

// The lines above the tables of health services.
const (
	frontendServices = "Frontend:"
	lbServices       = "Load balancer:"
	kubeServices     = "Kube:"
	targetServices   = "Target:"
)

// documentedServices returns the names in a table of health services.
func documentedServices(t *testing.T, above string) []string {
	t.Helper()
	var names []string
	for _, cells := range table(t, reference(t).below(t, above)) {
		if len(cells) != 3 || cells[1] == "" || cells[2] == "" {
			t.Errorf("the row of %q does not say what it means", cells[0])
		}
		names = append(names, code(cells[0])...)
	}
	return names
}

func TestEveryHealthServiceIsDocumented(t *testing.T) {
	for _, program := range []struct {
		above, file string
		more        []string
	}{
		{frontendServices, "pkg/frontend/frontend.go", []string{
			process.AdminSocket, "NSPCli", "RouteBack/ipv4", "RouteBack/ipv6", "SourceRouting/ipv4", "SourceRouting/ipv6",
		}},
		{lbServices, "pkg/lb/lb.go", []string{process.AdminSocket}},
		{kubeServices, "pkg/kube/kube.go", []string{process.AdminSocket}},
		{targetServices, "pkg/sidecar/sidecar.go", []string{"ADDRESS", process.AdminSocket}},
	} {
		t.Run(program.file, func(t *testing.T) {
			// The name contains the family or the VIP.
			want := program.more
			if program.above == frontendServices || program.above == lbServices {
				want = append([]string{"Egress/ipv4", "Egress/ipv6", "vip/PREFIX"}, want...)
			}
			for _, group := range constants(t, program.file) {
				if strings.HasPrefix(group.comment, "Health services of ") {
					want = append(want, slices.Collect(maps.Values(group.values))...)
				}
			}
			// Only served per family.
			want = slices.DeleteFunc(want, func(name string) bool { return name == frontend.RouteBack })
			if len(want) < 5 {
				t.Fatalf("found only %v in %s", want, program.file)
			}
			got := documentedServices(t, program.above)
			slices.Sort(want)
			slices.Sort(got)
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("the health services of %s (-) and those documented (+):\n%s", program.file, diff)
			}
		})
	}
}

func TestFrontendReasonsAreExplained(t *testing.T) {
	d := operations(t)
	documented := map[string]bool{}
	section := ""
	for _, l := range d.prose {
		if h := heading(l.text); strings.HasPrefix(l.text, "## ") {
			section = h
		} else if h != "" && section == "A VIP is not advertised" {
			documented[h] = true
		}
	}
	for number, name := range readinessv1.AdvertisementReason_name {
		words := status.Explain(readinessv1.AdvertisementReason(number))
		if !documented[words.Short] {
			t.Errorf("%s has no heading for %q", d.path, words.Short)
			continue
		}
		delete(documented, words.Short)
		label := strings.ToLower(strings.TrimPrefix(name, "ADVERTISEMENT_REASON_"))
		text := ""
		for _, l := range d.below(t, words.Short) {
			text += l.text + "\n"
		}
		if !strings.HasPrefix(strings.TrimSpace(text), "`"+label+"`: ") {
			t.Errorf("%s: what is below %q does not begin with its label `%s`", d.path, words.Short, label)
		}
	}
	for h := range documented {
		t.Errorf("%s explains %q, which is no reason", d.path, h)
	}
}

// TestPackageMap compares the map of packages in architecture.md, the only one, with the packages.
func TestPackageMap(t *testing.T) {
	mapped := map[string]bool{}
	d := read(t, filepath.Join(root, "docs", "architecture.md"))
	for _, cells := range table(t, d.below(t, "Packages and floors")) {
		for _, name := range code(cells[1]) {
			mapped[name] = true
		}
	}
	for _, pattern := range []string{"cmd/*", "pkg/*", "pkg/*/*"} {
		files, err := filepath.Glob(filepath.Join(root, pattern, "*.go"))
		harness.Must(t, err)
		for _, file := range files {
			dir, err := filepath.Rel(root, filepath.Dir(file))
			harness.Must(t, err)
			if !mapped[dir] && !strings.HasPrefix(dir, "pkg/api") {
				t.Errorf("docs/architecture.md does not map %s", dir)
				mapped[dir] = true
			}
		}
	}
	for name := range mapped {
		if _, err := os.Stat(filepath.Join(root, name)); err != nil {
			t.Errorf("docs/architecture.md maps %s: %v", name, err)
		}
	}
}

// maxWords bounds all documents together. A longer text replaces another one.
const maxWords = 45000

func TestWordsOfDocuments(t *testing.T) {
	total, words := 0, map[string]int{}
	for _, d := range documents(t) {
		text, err := os.ReadFile(d.path)
		harness.Must(t, err)
		words[d.path] = len(strings.Fields(string(text)))
		total += words[d.path]
	}
	if total <= maxWords {
		return
	}
	largest := slices.SortedFunc(maps.Keys(words), func(a, b string) int { return words[b] - words[a] })
	for _, path := range largest[:10] {
		t.Logf("%6d %s", words[path], path)
	}
	t.Errorf("the documents have %d words; at most %d", total, maxWords)
}

// TestStatusScreen checks that README.md shows a status as the frontend prints it.
func TestStatusScreen(t *testing.T) {
	golden, err := os.ReadFile(filepath.Join(root, "pkg/status/testdata/frontend-good.golden"))
	harness.Must(t, err)
	d := read(t, filepath.Join(root, "README.md"))
	if !slices.ContainsFunc(d.blocks, func(b block) bool { return b.text == string(golden) }) {
		t.Error("README.md does not show pkg/status/testdata/frontend-good.golden")
	}
}

func TestLBReasonsAreExplained(t *testing.T) {
	d := operations(t)
	got := map[string]string{}
	for _, cells := range table(t, d.below(t, "LB says not ready")) {
		got[strings.Join(code(cells[1]), "")] = cells[0]
	}
	want := map[string]string{}
	for number, name := range readinessv1.VipReason_name {
		want[strings.ToLower(strings.TrimPrefix(name, "VIP_REASON_"))] = status.Explain(readinessv1.VipReason(number)).Short
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("the reasons that exist (-) and those in %s (+):\n%s", d.path, diff)
	}
}

func TestDenialReasonsAreExplained(t *testing.T) {
	d := operations(t)
	var want, got []string
	for _, group := range constants(t, "pkg/identity/denial.go") {
		for name, value := range group.values {
			if strings.HasPrefix(name, "Reason") {
				want = append(want, value)
			}
		}
	}
	for _, cells := range table(t, d.below(t, "Denials")) {
		got = append(got, code(cells[0])...)
	}
	slices.Sort(want)
	slices.Sort(got)
	if diff := cmp.Diff(want, got); diff != "" || len(want) < 5 {
		t.Errorf("the reasons that exist (-) and those in %s (+):\n%s", d.path, diff)
	}
}

// group is a group of constants.
type group struct {
	comment string
	values  map[string]string // of those that are strings, by name
}

// constants returns the groups of constants in a Go file.
func constants(t *testing.T, file string) []group {
	t.Helper()
	f, err := parser.ParseFile(token.NewFileSet(), filepath.Join(root, file), nil, parser.ParseComments)
	harness.Must(t, err)
	var groups []group
	for _, decl := range f.Decls {
		g, ok := decl.(*ast.GenDecl)
		if !ok || g.Tok != token.CONST {
			continue
		}
		found := group{g.Doc.Text(), map[string]string{}}
		for _, spec := range g.Specs {
			s := spec.(*ast.ValueSpec)
			for i, name := range s.Names {
				if i >= len(s.Values) {
					continue
				}
				if lit, ok := s.Values[i].(*ast.BasicLit); ok && lit.Kind == token.STRING {
					value, err := strconv.Unquote(lit.Value)
					if err != nil {
						t.Fatalf("%s: %v", file, err)
					}
					found.values[name.Name] = value
				}
			}
		}
		groups = append(groups, found)
	}
	return groups
}
