package style

import (
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/test/harness"
)

// The limits of CONTRIBUTING.md. They only become stricter, but for all lines and flags, which grow
// with what is added, by name.
const (
	maxFileLines    = 520
	maxPackageLines = 3_500
	// Since 70 400: vipgate (3 200 with its page and the laboratory), explain and screens (900),
	// gateway-config (500), traces and callers of orders (550), routing policies (240) and their
	// display (420), weights (130), sessions of gateways (570), checks of UDP, DNS, NTP and
	// SCTP (950), the probe from beyond the gateways (1 340), several checks and slow start (370),
	// the feedback of probes to lb (1 200), speakers of other programs (1 380), BIRD, GoBGP and BMP
	// among them (1 150) and their names in messages (37), frr-k8s (400), host mode (740), raised
	// capabilities (32), ranges of VIPs in FRR's lists (47), stalls (153), equal IDs of streams (10),
	// VIPs that come back while the kernel removes them (15), routes removed twice (14), timeouts without
	// stalls (148), routers that ask for nothing (38), slow answers of BIRD (40), limits and quotas of
	// tenants, and what their checks, records and connections may do (1 620), the end of connections of
	// checks (100), edits of checks that most targets fail (150), the silence of BIRD (12),
	// and repairs of what readers found (360).
	maxProductLines = 86_321
	maxMethods      = 40
	// 9 of vipgate, 18 of vipgate-probe, 9 of its feedback to lb, 12 of speakers of other programs, 3 of
	// host mode, 1 of stalls, 1 of addresses of trench pods.
	maxFlags = 193
	// maxPhrases is the number of stilted phrases per 10 000 words of comments.
	maxPhrases = 15.0
)

// TestLimits counts the lines of product files, packages and all product code, and the methods of
// each type.
func TestLimits(t *testing.T) {
	lines, methods := map[string]int{}, map[string]int{}
	for _, file := range goFiles(t) {
		folder := filepath.Dir(file)
		if strings.HasSuffix(file, "_test.go") || !strings.HasPrefix(file, "pkg/") && !strings.HasPrefix(file, "cmd/") {
			continue
		}
		text, err := os.ReadFile(filepath.Join(root, file))
		harness.Must(t, err)
		n := strings.Count(string(text), "\n")
		lines[folder] += n
		if n > maxFileLines {
			t.Errorf("%s has %d lines; at most %d", file, n, maxFileLines)
		}
		tree, err := parser.ParseFile(token.NewFileSet(), file, text, parser.SkipObjectResolution)
		harness.Must(t, err)
		for _, declaration := range tree.Decls {
			if function, ok := declaration.(*ast.FuncDecl); ok && function.Recv != nil {
				methods[folder+"."+receiver(function)]++
			}
		}
	}
	total := 0
	for _, folder := range slices.Sorted(maps.Keys(lines)) {
		total += lines[folder]
		if lines[folder] > maxPackageLines {
			t.Errorf("%s has %d lines; at most %d", folder, lines[folder], maxPackageLines)
		}
	}
	if total > maxProductLines {
		t.Errorf("the product has %d lines (make lines); at most %d", total, maxProductLines)
	}
	for _, name := range slices.Sorted(maps.Keys(methods)) {
		if methods[name] > maxMethods {
			t.Errorf("%s has %d methods; at most %d", name, methods[name], maxMethods)
		}
	}
}

// receiver returns the name of a method's type.
func receiver(method *ast.FuncDecl) (name string) {
	ast.Inspect(method.Recv.List[0].Type, func(node ast.Node) bool {
		if identifier, ok := node.(*ast.Ident); ok && name == "" {
			name = identifier.Name
		}
		return true
	})
	return name
}

// phrases match comments that read as if translated: pronouns and what-clauses in place of nouns,
// programs that speak.
var phrases = regexp.MustCompile(`(?i)\b(?:` + strings.Join([]string{
	`what (?:is|was|are|were|has|had|it|they|the|a|an|another|should|would|can|remains|does|he|others?)\b`,
	`(?:that|those) of\b`,
	`at once\b`,
	`(?:says|say|said|told|tell|tells|hears?|heard|believes?|believed)\b`,
	`(?:meanwhile|beside|behind|of its own|of their own|of one's own|from then on|by itself)\b`,
	`others\b`,
	`(?:is|are|was|were) no (?:[^l]|l[^o])`,
}, "|") + `)`)

// TestPhrases counts stilted phrases in the comments of product and test code.
func TestPhrases(t *testing.T) {
	for _, tests := range []bool{false, true} {
		words, found := 0, []string(nil)
		for _, file := range goFiles(t) {
			if isTest := strings.HasSuffix(file, "_test.go") || strings.HasPrefix(file, "test/"); isTest != tests {
				continue
			}
			text, err := os.ReadFile(filepath.Join(root, file))
			harness.Must(t, err)
			for line := range strings.Lines(string(text)) {
				before, comment, ok := strings.Cut(line, "//")
				if !ok || strings.Contains(line, "://") || strings.TrimRight(before, " \t") == before && before != "" {
					continue // no comment
				}
				words += len(strings.Fields(comment))
				for range phrases.FindAllString(comment, -1) {
					found = append(found, file+": "+strings.TrimSpace(comment))
				}
			}
		}
		if rate := 1e4 * float64(len(found)) / float64(words); rate > maxPhrases {
			t.Errorf("%.1f phrases per 10 000 words of comments; at most %.0f:\n%s", rate, maxPhrases, strings.Join(found, "\n"))
		}
	}
}

// goFiles returns the handwritten Go files.
func goFiles(t *testing.T) []string {
	t.Helper()
	return slices.DeleteFunc(sources(t), func(file string) bool { return filepath.Ext(file) != ".go" })
}

// TestFlags counts the flags of all programs, each program's on its own. Those that meridio-frontend
// has in common with frontend, which it replaces, count once.
func TestFlags(t *testing.T) {
	flags := programFlags(t)
	flags["meridio-frontend"] = slices.DeleteFunc(flags["meridio-frontend"],
		func(name string) bool { return slices.Contains(flags["frontend"], name) })
	total := 0
	for name, list := range flags {
		t.Logf("%s: %d", name, len(list))
		total += len(list)
	}
	if len(flags) != 7 || total > maxFlags {
		t.Errorf("%d programs have %d flags; at most %d", len(flags), total, maxFlags)
	}
}
