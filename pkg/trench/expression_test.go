package trench

import (
	"regexp"
	"regexp/syntax"
	"runtime"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func TestBodyLimits(t *testing.T) {
	repeat := strings.Repeat
	for _, tt := range []struct{ name, expression, refusal string }{
		// Used
		{"word", `^ok`, ""},
		{"status", `"status":\s*"(UP|ok)"`, ""},
		{"case", `(?i)healthy`, ""},
		{"flags", `(?is)^.*healthy.*$`, ""},
		{"letters", `^\pL+ \p{Lu}\pL{1,10}$`, ""},
		{"address", `^192\.0\.2\.1$`, ""},
		{"UUID", `(?i)[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}`, ""},
		{"Cyrillic", `(?i)^[а-яё]+$`, ""},
		{"Han", `(?i)^[一-龥]+ [\x{4e00}-\x{9fa5}]$`, ""},
		{"open quotation", `\Qok`, ""},
		{"quotation", `^\Q{"ok": [1-2]}\E$`, ""},
		{"text", repeat("a", 1000), ""},
		{"long text", repeat("é", 1000), ""},
		{"lines", repeat("ok|up|", 166) + "ok", ""},
		{"hyphen at the end", `(?i)a-`, ""},

		// Parts
		{"1999 parts", `ab.{0,998}`, ""},
		{"2000 parts", `^.{0,999}`, ""},
		{"2001 parts", `^.{0,999}$`, `is "^.{0,999}$", of 2001 parts with all repeats written out`},
		{"repeat", "(?:" + repeat("a", 980) + "){0,1000}", "of 981000 parts"},
		{"repeats", repeat("a{0,1000}", 22) + "b", "of 44002 parts"},
		{"nested repeats", `(?:(?:a{0,10}){0,10}){0,10}`, "of 2110 parts"},
		{"least repeats", `a{1000,}b{1000,}`, "of 4001 parts"},
		{"groups", repeat("(a?)", 90), ""},
		{"many groups", repeat("()", 100), "of 2101 parts"},
		{"groups in a repeat", "(a){0,1000}", "of 22000 parts"},
		{"many threads", repeat("(a?)", 50) + ".{0,440}", ""},
		{"letters in one pass", `^\pL{990}$`, " parts"},
		{"escapes in a repeat", `^[\101-\377]{990}$`, ""},
		{"alternatives", `^(?:` + repeat("ab|", 300) + `c)$`, ""},
		{"nested groups", repeat("(", 498) + repeat(")", 498), " parts"},
		{"nested options", repeat("(?:a", 190) + repeat(")?", 190), ""},
		{"too deep", repeat("(?:", 332) + "a", "no regular expression"},

		// Unicode classes
		{"20 classes", `[` + repeat(`\pL`, 19) + `\PN]`, ""},
		{"20 classes and case", `(?i)[` + repeat(`\pL`, 19) + `\PN]`, ""},
		{"21 classes", `[` + repeat(`\pL`, 20) + `\PN]`, `has 21 classes such as \pL`},
		{"classes", repeat(`\p{L}`, 20), " parts"},
		{"most classes", repeat(`\pL`, 330), "has 330 classes"},

		// Ranges that ignore case
		{"65535 characters", `(?i)[A-\x{ffff}]`, ""},
		{"65536 characters", `(?i)[A-\x{10000}]`, ""},
		{"65537 characters", `(?i)[A-\x{10001}]`, "has ranges of 65537 characters and (?i)"},
		{"no limit with case", `[A-\x{10001}]`, ""},
		{"ranges", `(?i)[` + repeat("B-𞥂", 330) + `]`, " characters"},
		{"ranges from a hyphen", `(?i)[` + repeat("--𞥂", 330) + `]`, " characters"},
		{"codes", `(?i)[` + repeat(`B-\x{1e942}`, 90) + `]`, " characters"},
		{"codes with zeros", `(?i)[` + repeat(`B-\x{0000001e942}`, 60) + `]`, " characters"},
		{"no code", `(?i)[B-\x{fffffffffffffffff}]`, " characters"},
		{"flags before", `(?smi)[` + repeat("B-𞥂", 300) + `]`, " characters"},
		{"flags within", `a(?mi:[` + repeat("B-𞥂", 300) + `])`, " characters"},
		{"octal escapes", `(?i)[` + repeat(`\0-\377`, 140) + `]`, " characters"},
		{"hexadecimal escapes", `(?i)[` + repeat(`B-\xff`, 120) + `]`, ""},
		{"Perl classes", `(?i)[` + repeat(`\W\D\S`, 160) + `]`, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			problem := checkBody(tt.expression)
			if problem == (Problem{}) {
				compiled, limit := CompileBody(tt.expression)
				compiled.MatchString(strings.Repeat("a", min(limit, 1000)))
			}
			runtime.ReadMemStats(&after)
			const most = 2 << 20
			if allocated := after.TotalAlloc - before.TotalAlloc; allocated > most {
				t.Errorf("allocates %d KiB", allocated>>10)
			}
			if (problem == Problem{}) != (tt.refusal == "") || !strings.Contains(problem.Text, tt.refusal) {
				t.Errorf("%+v, want %q", problem, tt.refusal)
			}
		})
	}
}

// An expression that is accepted compiles, with the number of instructions that the limit allows.
func TestBodyParts(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		expression := ""
		for _, piece := range rapid.SliceOfN(rapid.SampledFrom([]string{
			"%sa", "%s?", "(%s)", "(?:%s|b)", "(?i:%sK)*", "(?:%s){3}", "(?:%s){2,}", "(?:%s){0,7}?", "(?:%s){0,0}", "%s|xy|",
			"(%s*)+", `%sé*`, `%s[\pL-]+`, `%s[^a-c]`, `^%s$`, `\b%s.`, `%s\Q(*\E`, `%s\Q(`,
		}), 1, 20).Draw(t, "pieces") {
			expression = strings.Replace(piece, "%s", expression, 1)
		}
		parsed, err := syntax.Parse(expression, syntax.Perl)
		if err != nil {
			t.Skip(err)
		}
		compiled, limit := CompileBody(expression)
		if compiled == nil || limit < 4<<10 || limit > 64<<10 {
			t.Fatalf("limit of %d bytes", limit)
		}
		program, err := syntax.Compile(parsed.Simplify())
		const ends = 2 // the failure and the match
		if parts := partsOf(parsed); err != nil || len(program.Inst) > parts+ends {
			t.Fatalf("%q has %d parts and %d instructions, %v", expression, parts, len(program.Inst), err)
		}
	})
}

func TestBodyMatchLimit(t *testing.T) {
	for expression, want := range map[string]int{
		"": 64 << 10, strings.Repeat("a", 100): 64 << 10, strings.Repeat("a", 101): 64887,
		strings.Repeat("a", 1000): 6553, "^.{0,699}": 4681, "^.{0,999}": 4 << 10,
	} {
		compiled, got := CompileBody(expression)
		if got != want || compiled.String() != regexp.MustCompile(expression).String() {
			t.Errorf("%q: %d bytes are matched, want %d", expression, got, want)
		}
	}
}
