package registry

import (
	"strings"
	"testing"

	"github.com/spiffe/go-spiffe/v2/spiffeid"

	"github.com/vipgate/vipgate/test/harness"
)

func TestPatternsMatchWholeSegments(t *testing.T) {
	for _, tt := range []struct {
		pattern string
		match   []string
		differ  []string
	}{
		{
			"spiffe://example.org/ns/a/sa/app",
			[]string{"spiffe://example.org/ns/a/sa/app"},
			[]string{
				"spiffe://example.org/ns/a/sa/app2", "spiffe://example.org/ns/a/sa",
				"spiffe://example.org/ns/a/sa/app/x", "spiffe://example.net/ns/a/sa/app", "spiffe://example.org",
			},
		},
		{
			"spiffe://example.org/ns/*/sa/app",
			[]string{"spiffe://example.org/ns/a/sa/app", "spiffe://example.org/ns/b.c/sa/app"},
			[]string{
				"spiffe://example.org/ns/sa/app", "spiffe://example.org/ns/a/b/sa/app",
				"spiffe://sub.example.org/ns/a/sa/app", "spiffe://example.org/NS/a/sa/app",
			},
		},
		{
			"spiffe://example.org/ns/*",
			[]string{"spiffe://example.org/ns/a"},
			[]string{"spiffe://example.org/ns", "spiffe://example.org/ns/a/b"},
		},
		{
			"spiffe://example.org/ns/**",
			[]string{"spiffe://example.org/ns/a", "spiffe://example.org/ns/a/b/c"},
			[]string{"spiffe://example.org/ns", "spiffe://example.org/nsx/a", "spiffe://example.net/ns/a"},
		},
		{
			"spiffe://example.org/**",
			[]string{"spiffe://example.org/a", "spiffe://example.org/a/b"},
			[]string{"spiffe://example.org", "spiffe://example.org.net/a"},
		},
		{
			"spiffe://example.org/*/**",
			[]string{"spiffe://example.org/a/b", "spiffe://example.org/a/b/c"},
			[]string{"spiffe://example.org/a"},
		},
	} {
		p, err := ParseAllowance(tt.pattern)
		if err != nil {
			t.Errorf("%s: %v", tt.pattern, err)
			continue
		}
		if p.String() != tt.pattern {
			t.Errorf("%s is given back as %s", tt.pattern, p)
		}
		for _, id := range tt.match {
			if !p.matches(spiffeid.RequireFromString(id)) {
				t.Errorf("%s does not match %s", tt.pattern, id)
			}
		}
		for _, id := range tt.differ {
			if p.matches(spiffeid.RequireFromString(id)) {
				t.Errorf("%s matches %s", tt.pattern, id)
			}
		}
	}
	if (Allowance{}).matches(spiffeid.RequireFromString("spiffe://example.org/a")) ||
		(Allowance{}).matches(spiffeid.ID{}) {
		t.Error("the zero pattern matches something")
	}
}

func TestBadAllowances(t *testing.T) {
	longest := "spiffe://example.org/" + strings.Repeat("a", maxPattern-len("spiffe://example.org/"))
	for in, want := range map[string]string{
		"":                                  "spiffe://example.org/ns/*/sa/app",
		"app":                               "spiffe://example.org/ns/*/sa/app",
		"https://example.org/a":             "not a pattern of SPIFFE IDs",
		"SPIFFE://example.org/a":            "not a pattern of SPIFFE IDs",
		"spiffe://":                         "not a trust domain",
		"spiffe:///a":                       "not a trust domain",
		"spiffe://Example.org/a":            "not a trust domain",
		"spiffe://*/a":                      "not a trust domain",
		"spiffe://*.org/a":                  "not a trust domain",
		"spiffe://spiffe:/a":                "not a trust domain",
		"spiffe://example.org":              "spiffe://example.org/**",
		"spiffe://example.org/":             "spiffe://example.org/**",
		"spiffe://example.org/a/":           "not a segment",
		"spiffe://example.org//a":           "not a segment",
		"spiffe://example.org/a/../b":       "not a segment",
		"spiffe://example.org/a b":          "not a segment",
		"spiffe://example.org/a*":           "stands for a whole segment",
		"spiffe://example.org/a/***":        "stands for a whole segment",
		"spiffe://example.org/**/a":         "only be the last segment",
		"=spiffe://example.org/a":           "the stream has no name",
		"a b=spiffe://example.org/a":        `the stream "a b" is not a name`,
		"stream-a-1=":                       "not a pattern",
		"stream-a-1=x=spiffe://example.org": "not a pattern",
		longest + "a":                       "2048 at most",
	} {
		if a, err := ParseAllowance(in); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.60q: %v, %v; want %q", in, a, err, want)
		}
	}
	_, err := ParseAllowance(longest)
	harness.Check(t, err)
}

func TestAllowancesOfStreams(t *testing.T) {
	var all Allowances
	for _, s := range []string{"stream-a-1=spiffe://example.org/ns/*/sa/app", "spiffe://example.org/operator"} {
		var a Allowance
		harness.Must(t, a.UnmarshalText([]byte(s)))
		if a.String() != s {
			t.Errorf("%s is given back as %s", s, a)
		}
		all = append(all, a)
	}
	app, operator, other := spiffeid.RequireFromString("spiffe://example.org/ns/x/sa/app"),
		spiffeid.RequireFromString("spiffe://example.org/operator"),
		spiffeid.RequireFromString("spiffe://example.org/other")
	for _, tt := range []struct {
		id     spiffeid.ID
		stream string
		want   bool
	}{
		{app, "stream-a-1", true},
		{app, "stream-a-2", false},
		{operator, "stream-a-1", true},
		{operator, "stream-a-2", true},
		{other, "stream-a-1", false},
	} {
		if got := all.Allows(tt.id, tt.stream); got != tt.want {
			t.Errorf("%s and %s: %v", tt.id, tt.stream, got)
		}
	}
	if !all.Authorizes(app) || !all.Authorizes(operator) || all.Authorizes(other) {
		t.Error("the handshake would let others in than may register")
	}
}

func FuzzAllowance(f *testing.F) {
	for _, s := range []string{
		"stream-a-1=spiffe://example.org/ns/*/sa/app", "spiffe://example.org/**", "spiffe://a/b",
		"x=", "=", "spiffe://a/*",
	} {
		f.Add(s, "spiffe://example.org/ns/a/sa/app")
	}
	f.Fuzz(func(t *testing.T, s, id string) {
		a, err := ParseAllowance(s)
		if err != nil {
			return
		}
		again, err := ParseAllowance(a.String())
		if err != nil || again.String() != a.String() || a.String() != s {
			t.Fatalf("%q is given back as %q: %v", s, a, err)
		}
		parsed, err := spiffeid.FromString(id)
		if err != nil {
			return
		}
		switch matches := a.matches(parsed); {
		case matches && parsed.TrustDomain() != a.domain:
			t.Fatalf("%q matches %q of another trust domain", s, id)
		case !strings.Contains(s, "*") && matches != (s[strings.Index(s, "=")+1:] == id):
			t.Fatalf("%q without a * matches %q: %v", s, id, matches)
		}
	})
}
