package docs

import (
	"cmp"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"regexp/syntax"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v4"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/trench"
	trenchfile "github.com/vipgate/vipgate/pkg/trench/file"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/clitest"
	"github.com/vipgate/vipgate/test/harness"
)

// limit is a limit that no tag of the trench file has.
type limit struct {
	of string
	// most is the constant FILE.NAME below pkg, or the number itself.
	most, what string
	// accepts tries an amount; proof names the test that does, FILE.NAME, where it cannot be here.
	accepts func(t *testing.T, amount int) bool
	proof   string
}

var limits = []limit{
	{"trench file", "trench/file/parse.MaxSize", "MiB", acceptsFile, ""},
	{"trench file", "trench/config.MaxMatch", "ports of a `match`, each per protocol", acceptsPorts, ""},
	{"trench file", "20", "numbers and ranges of `http.status`", acceptsText("status", func(n int) string {
		return strings.Repeat("200,", n-1) + "200-299"
	}), ""},
	{"trench file", "253", "characters of `dns.name`", acceptsText("domain", func(n int) string {
		return strings.Repeat("a.", (n-1)/2) + strings.Repeat("a", 2-n%2)
	}), ""},
	{"trench file", "trench/expression.maxParts", "parts of an expression", acceptsText("body", func(n int) string {
		return "^.{0,999}" + strings.Repeat("$", n-2000)
	}), ""},
	{"trench file", "trench/expression.maxTables", "classes (`\\pL`) in it", acceptsText("body", func(n int) string {
		return "[" + strings.Repeat(`\pL`, n) + "]"
	}), ""},
	{"trench file", "trench/expression.maxFolded", "characters in `(?i)` ranges", acceptsText("body",
		func(n int) string { return fmt.Sprintf(`(?i)[A-\x{%x}]`, n) }), ""},
	{"trench file", "80", "bytes of a TCP-MD5 password", nil, "pkg/bird/render_test.TestParsePassword"},
	{
		"trench file", "trench/file/stale.maxStaleFile", "bytes of `<trench file>.stale`", nil,
		"pkg/trench/file/stale_test.TestStaleFileLeavesConfiguration",
	},

	{
		"Services of other namespaces", "kube/v1alpha1/trench.MaxStreams", "streams", nil,
		"pkg/kube/translation/tenants_test.TestQuotaOfNamespaces",
	},
	{
		"Services of other namespaces", "kube/v1alpha1/trench.MaxTargets", "targets (or a `quota`)", nil,
		"pkg/kube/translation/quotas_test.TestQuotaOfAllTargets",
	},
	{
		"Services of other namespaces", "kube/v1alpha1/trench.MaxHeld", "VIPs in `status.holders`", nil,
		"pkg/kube/translation/tenants_test.TestBoundOfHolders",
	},

	{"data plane", "dataplane/plan/names.MaxHostVIPs", "VIPs of one address per family", acceptsHosts, ""},
	{"data plane", "dataplane/fwmark.fwmarkRange", "targets", nil, "pkg/dataplane/fwmark_test.TestFWMarksAreBounded"},
	{
		"data plane", "replypath/ruleset.maxPeers", "peers per `target`", nil,
		"pkg/replypath/forged_test.TestForgedLinkAddresses",
	},

	{"`lb`", "healthcheck/run.burst", "checks per 10 ms", nil, "pkg/healthcheck/checker_test.TestStallCausesNoBurst"},
	{
		"`lb`", "registry/registry.maxTargets", "registered targets", nil,
		"pkg/registry/registry_test.TestRefusalsChangeNothing",
	},
	{"`lb`", "registry/request.MaxTargetsPerCall", "of a call", nil, "pkg/registry/service_test.TestRefusedRequests"},
	{
		"`lb`", "registry/allowance.maxPattern", "bytes of `--target-id`", nil,
		"pkg/registry/allowance_test.TestBadAllowances",
	},
	{"`vipgate-probe`", "64", "`--ports`", nil, "cmd/vipgate-probe/main_test.TestRefusedFlags"},
	{"`vipgate-probe`", "feedback/service.maxPaths", "paths", nil, "pkg/feedback/feedback_test.TestRefusedReports"},
	{
		"`vipgate-probe`", "feedback/service.maxSources", "sources", nil,
		"pkg/feedback/feedback_test.TestRefusedReports",
	},
	{"files", "readinessfile/reader.maxFiles", "for readiness", nil, "pkg/readinessfile/reader_test.TestFilesAreBounded"},
	{
		"files", "identity/listen.maxSocketPath", "bytes of a socket's path", nil,
		"pkg/identity/listen_test.TestInvalidSocketAddresses",
	},

	{
		"listeners", "endpoint/limit.MaxConnections", "connections", nil,
		"pkg/endpoint/limit_test.TestLimitClosesOldestOfBusiestSource",
	},
	{
		"listeners", "endpoint/limit.MaxRegistryConnections", "with registry", nil,
		"pkg/endpoint/limit_test.TestLimitClosesOldestOfBusiestSource",
	},
	{"listeners", "16", "health streams per connection", nil, "pkg/endpoint/endpoint_test.TestPlainEndpointLimits"},
	{
		"listeners", "metrics/server.maxScrapes", "concurrent scrapes", nil,
		"pkg/metrics/metrics_test.TestScrapesAreBounded",
	},
	{
		"listeners", "readiness/server.DefaultMaxStreamsPerPeer", "readiness streams per SPIFFE ID", nil,
		"pkg/readiness/server_test.TestStreamLimit",
	},
}

// TestLimitsAreListed compares the limits in the reference with the tags of the trench file, the
// schema of the Trench, and the constants of the programs, and tries each at n and n + 1.
func TestLimitsAreListed(t *testing.T) {
	var order []string
	rows := map[string][]string{}
	add := func(of string, cells ...string) {
		if rows[of] == nil {
			order = append(order, of)
		}
		rows[of] = append(rows[of], cells...)
	}
	for _, object := range objectsOf(reflect.TypeFor[trench.Config](), nil) {
		fields := trench.FieldsOf(object)
		for i := range fields {
			cell, name := limitOf(t, object, &fields[i]), strings.TrimSuffix(strings.ToLower(object.Name()), "check")
			of := strings.Replace("`"+cmp.Or(name, "check")+"`", "`config`", "file", 1)
			if fields[i].Key == "port" { // of each kind of check
				of = "`check`"
			}
			if cell != "" && !slices.Contains(rows[of], cell) {
				add(of, cell)
			}
		}
	}
	add("Trench", limitsOfTrench(t)...)
	add("flags", limitsOfFlags(t)...)
	for _, of := range limits {
		most, number := of.value(t)
		if of.accepts == nil {
			wantTest(t, of.proof)
		} else if !of.accepts(t, number) || of.accepts(t, number+1) {
			t.Errorf("%s %s of %s: %d, %d: accepted %t, %t", most, of.what, of.of, number, number+1,
				of.accepts(t, number), of.accepts(t, number+1))
		}
		add(of.of, most+" "+of.what)
	}
	var b strings.Builder
	b.WriteString("|of|limits|\n|---|---|\n") // a space more would be a word more
	for _, of := range order {
		fmt.Fprintf(&b, "|%s|%s|\n", of, strings.Join(together(rows[of]), "; "))
	}
	clitest.GeneratedSection(t, reference(t).path, "limits", b.String())
}

// together joins fields and flags that have the same limits.
func together(cells []string) (joined []string) {
	for _, cell := range cells {
		key, bounds, _ := strings.Cut(cell, "` ")
		same := func(other string) bool { return key[0] == '`' && strings.HasSuffix(other, "` "+bounds) }
		if at := slices.IndexFunc(joined, same); at >= 0 {
			joined[at] = strings.TrimSuffix(joined[at], " "+bounds) + ", " + cell
			continue
		}
		joined = append(joined, cell)
	}
	return joined
}

// objectsOf returns the types of the objects in a value of a type, after those that are known.
func objectsOf(of reflect.Type, known []reflect.Type) []reflect.Type {
	for slices.Contains([]reflect.Kind{reflect.Slice, reflect.Array, reflect.Pointer}, of.Kind()) {
		of = of.Elem()
	}
	// Members of a check have fields of the check.
	leaves := []reflect.Type{trench.VIPType, trench.AddressType, reflect.TypeFor[trench.SingleCheck]()}
	if of.Kind() != reflect.Struct || slices.Contains(leaves, of) || slices.Contains(known, of) {
		return known
	}
	known = append(known, of)
	for _, field := range trench.FieldsOf(of) {
		known = objectsOf(field.Type, known)
	}
	return known
}

// limitOf returns the limits of a field, after a trial of each.
func limitOf(t *testing.T, object reflect.Type, field *trench.Field) string {
	t.Helper()
	item, isList := field.Type, slices.Contains([]reflect.Kind{reflect.Slice, reflect.Array}, field.Type.Kind())
	if isList {
		item = item.Elem()
	}
	try := func(text string, want bool) {
		t.Helper()
		if problem := field.Parse(text, reflect.New(item).Elem()); (problem == trench.Problem{}) != want {
			t.Errorf("%s.%s: %.80q is accepted: %t, %+v", object.Name(), field.Key, text, !want, problem)
		}
	}
	least, most := field.Tag.Get("min"), field.Tag.Get("max")
	text := ""
	if field.Tag.Get("form") != "" {
		text = longest(t, field.Pattern())
	}
	switch items, err := strconv.Atoi(most); {
	case least != "":
		try(least, true)
		try(most, true)
		try(beyond(least, -1), false)
		try(beyond(most, 1), false)
		return fmt.Sprintf("`%s` %s–%s", field.Key, least, most)
	case isList && err == nil:
		if field.TooMany(items) != (trench.Problem{}) || field.TooMany(items+1) == (trench.Problem{}) {
			t.Errorf("%s.%s: not %d items", object.Name(), field.Key, items)
		}
		most = " " + most
	case most != "":
		t.Errorf("%s.%s has a limit that is not listed", object.Name(), field.Key)
	}
	if text != "" {
		try(text, true)
		try(text+"a", false)
		if isList {
			most += " of"
		}
		most += fmt.Sprint(" ", len([]rune(text)))
	}
	if most == "" {
		return ""
	}
	return "`" + field.Key + "`" + most
}

// beyond returns a number or a duration with a little more.
func beyond(text string, more int) string {
	if number, err := strconv.Atoi(text); err == nil {
		return strconv.Itoa(number + more)
	}
	duration, _ := time.ParseDuration(text)
	return (duration + time.Duration(more)).String()
}

// boundPattern matches a repeat of characters that bounds a text.
var boundPattern = regexp.MustCompile(`\]\{\d,(1[5-9]|[2-9]\d|\d{3,})\}`)

// longest returns the longest text of a pattern that bounds its length, or "".
func longest(t *testing.T, pattern string) string {
	t.Helper()
	parsed, err := syntax.Parse(pattern, syntax.Perl)
	harness.Must(t, err)
	if text, bounded := expand(parsed); bounded && boundPattern.MatchString(pattern) {
		return text
	}
	return ""
}

// expand returns the longest text of an expression, and reports whether there is one.
func expand(of *syntax.Regexp) (text string, bounded bool) {
	switch of.Op {
	case syntax.OpLiteral:
		return string(of.Rune), true
	case syntax.OpCharClass, syntax.OpAnyChar:
		if len(of.Rune) == 0 || regexp.MustCompile(of.String()).MatchString("a") {
			return "a", true
		}
		return string(of.Rune[0]), true
	case syntax.OpStar, syntax.OpPlus:
		return "", false
	}
	for _, part := range of.Sub {
		more, ok := expand(part)
		switch {
		case !ok || of.Op == syntax.OpRepeat && of.Max < 0:
			return "", false
		case of.Op == syntax.OpRepeat:
			text = strings.Repeat(more, of.Max)
		case of.Op == syntax.OpConcat:
			text += more
		case len(more) > len(text):
			text = more
		}
	}
	return text, true
}

// limitsOfTrench returns the limits of lists that only the schema of the Trench has, for the API
// server, and of its name.
func limitsOfTrench(t *testing.T) (cells []string) {
	t.Helper()
	wantTest(t, "test/kube-e2e/validation_test.TestTrenchLists")
	text, err := os.ReadFile(filepath.Join(root, "deployments/kubernetes/crd.yaml"))
	harness.Must(t, err)
	var crd any
	harness.Must(t, yaml.Unmarshal(text, &crd))
	at := func(of any, path ...any) any {
		for _, key := range path {
			if number, ok := key.(int); ok {
				of = of.([]any)[number]
			} else {
				of = of.(map[string]any)[key.(string)]
			}
		}
		return of
	}
	schema := at(crd, "spec", "versions", 0, "schema", "openAPIV3Schema", "properties")
	cells = append(cells, fmt.Sprint("`name` ", at(schema, "metadata", "properties", "name", "maxLength")))
	for _, path := range []string{"attractor.gateways", "network.subnets", "communities", "publish.addresses"} {
		of := at(schema, "spec")
		for key := range strings.SplitSeq(path, ".") {
			of = at(of, "properties", key)
		}
		cells = append(cells, fmt.Sprintf("`%s` %v", path, at(of, "maxItems")))
	}
	return cells
}

// withinPattern matches the bounds of a duration, of which names are constants of the file.
var withinPattern = regexp.MustCompile(`\.Within\("?([^",]+)"?, [^,]+, ([^,]+), ([^,)]+)\)`)

// limitsOfFlags returns the bounds of durations that the programs check with Within.
func limitsOfFlags(t *testing.T) (cells []string) {
	t.Helper()
	wantTest(t, "cmd/internal/cli/parse_test.TestWithin")
	wantTest(t, "pkg/lb/loop_test.TestLeaseIsBounded")
	wantTest(t, "pkg/lb/admin_test.TestDrainTimeIsBounded")
	cells = append(cells,
		"`--lease` "+duration(t, constant(t, filepath.Join(root, "pkg/readiness/readiness.go"), "MaxLease")),
		"`--drain-time` of `lb target drain` "+duration(t, constant(t, filepath.Join(root, "pkg/lb/drain.go"), "maxDrain")))
	for _, pattern := range []string{"cmd/lb/*.go", "cmd/internal/frontendcmd/*.go"} {
		files, err := filepath.Glob(filepath.Join(root, pattern))
		harness.Must(t, err)
		for _, file := range files {
			text, err := os.ReadFile(file)
			harness.Must(t, err)
			for _, call := range withinPattern.FindAllStringSubmatch(string(text), -1) {
				for i, argument := range call {
					if token.IsIdentifier(argument) {
						call[i] = strings.Trim(constant(t, file, argument), `"`)
					}
				}
				cell := "`" + call[1] + "` " + duration(t, call[3])
				if call[2] != "0" {
					cell = "`" + call[1] + "` " + duration(t, call[2]) + "–" + duration(t, call[3])
				}
				cells = append(cells, cell)
			}
		}
	}
	slices.Sort(cells)
	if cells = slices.Compact(cells); len(cells) < 10 {
		t.Errorf("only the flags %v have bounds", cells)
	}
	return cells
}

// duration returns a constant duration as a user writes it.
func duration(t *testing.T, expression string) string {
	t.Helper()
	for unit, length := range map[string]time.Duration{
		"time.Second": time.Second, "time.Minute": time.Minute, "time.Hour": time.Hour,
	} {
		expression = strings.ReplaceAll(expression, unit, strconv.Itoa(int(length)))
	}
	value, err := types.Eval(token.NewFileSet(), nil, token.NoPos, expression)
	harness.Must(t, err)
	number, err := strconv.Atoi(value.Value.ExactString())
	harness.Must(t, err)
	return strings.NewReplacer("m0s", "m", "h0m0s", "h").Replace(time.Duration(number).String())
}

// value returns the limit as text and as a number.
func (of limit) value(t *testing.T) (text string, number int) {
	t.Helper()
	file, name, isConstant := strings.Cut(of.most, ".")
	expression := of.most
	if isConstant {
		expression = constant(t, filepath.Join(root, "pkg", file+".go"), name)
	}
	expression = strings.ReplaceAll(expression, "trench.MaxVIPs", strconv.Itoa(trench.MaxVIPs))
	value, err := types.Eval(token.NewFileSet(), nil, token.NoPos, expression)
	harness.Must(t, err)
	number, err = strconv.Atoi(value.Value.ExactString())
	harness.Must(t, err)
	if of.what == "MiB" {
		return strconv.Itoa(number >> 20), number
	}
	return strconv.Itoa(number), number
}

// constant returns the expression of a constant in a file.
func constant(t *testing.T, file, name string) (expression string) {
	t.Helper()
	parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
	harness.Must(t, err)
	ast.Inspect(parsed, func(node ast.Node) bool {
		if spec, ok := node.(*ast.ValueSpec); ok {
			at := slices.IndexFunc(spec.Names, func(id *ast.Ident) bool { return id.Name == name })
			if at >= 0 && at < len(spec.Values) {
				expression = types.ExprString(spec.Values[at])
			}
		}
		return true
	})
	if expression == "" {
		t.Fatalf("%s has no constant %s", file, name)
	}
	return expression
}

// wantTest fails unless a test exists, FILE.NAME.
func wantTest(t *testing.T, path string) {
	t.Helper()
	file, name, _ := strings.Cut(path, ".")
	text, err := os.ReadFile(filepath.Join(root, file+".go"))
	harness.Must(t, err)
	if !strings.Contains(string(text), "\nfunc "+name+"(t *testing.T)") {
		t.Errorf("%s.go has no %s, which tries a limit", file, name)
	}
}

// acceptsText tries texts in the field of a check with a form.
func acceptsText(form string, text func(n int) string) func(*testing.T, int) bool {
	return func(t *testing.T, amount int) bool {
		t.Helper()
		for _, object := range []reflect.Type{reflect.TypeFor[trench.HTTPCheck](), reflect.TypeFor[trench.DNSCheck]()} {
			for _, field := range trench.FieldsOf(object) {
				if field.Tag.Get("form") == form {
					return field.Parse(text(amount), reflect.New(field.Type).Elem()) == trench.Problem{}
				}
			}
		}
		t.Fatalf("no field has the form %q", form)
		return false
	}
}

func acceptsFile(t *testing.T, size int) bool {
	t.Helper()
	file := "trench: t\nattractor: {name: a, vips: []}\n#"
	path := filepath.Join(t.TempDir(), "trench.yaml")
	harness.Must(t, os.WriteFile(path, []byte(file+strings.Repeat("x", size-len(file))), 0o600))
	_, err := trenchfile.Read(path, trench.DefaultDefaults())
	return err == nil
}

func acceptsPorts(_ *testing.T, ports int) bool {
	match := trench.Match{Protocols: []string{"tcp"}}
	for port := range ports - 2 {
		match.Ports = append(match.Ports, uint16(port+1))
	}
	both := trench.Match{Protocols: []string{"udp", "sctp"}, Ports: []uint16{1}}
	config := trench.Config{Streams: []trench.Stream{{Match: []trench.Match{match, both}}}}
	return !slices.ContainsFunc(trench.Validate(&config),
		func(problem trench.Problem) bool { return problem.Path == "streams[0].match" })
}

func acceptsHosts(_ *testing.T, vips int) bool {
	stream := &plan.Stream{Name: "a", VIPs: []vip.VIP{vip.Require("2000::1/128"), vip.Require("30.0.0.0/24")}}
	address := netip.MustParseAddr("20.0.0.0")
	for range vips {
		stream.VIPs, address = append(stream.VIPs, vip.Require(address.String()+"/32")), address.Next()
	}
	owners := plan.AssignVIPs(map[string]*plan.Stream{"a": stream}, nil, nil)
	owners.Limit(nil)
	return len(owners.Problems) == 0
}
