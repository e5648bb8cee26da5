package translation

import (
	"strings"
	"testing"
)

func TestShortened(t *testing.T) {
	long := strings.Repeat("a", 300)
	for in, want := range map[string]string{
		"web-1": "web-1", "a.b_c": "a.b_c", "": "-e3b0c44298fc1c14", "a b": "a-b-c8687a08aa5d6ed2",
		long: strings.Repeat("a", 43) + "-9835fa6bf4e20a9b",
	} {
		if got := shortened(in, 60); got != want {
			t.Errorf("shortened(%q) is %q, want %q", in, got, want)
		}
	}
	if a, b := shortened(long+"1", 60), shortened(long+"2", 60); a == b || len(a) != 60 {
		t.Errorf("%q and %q", a, b)
	}
}

func TestMessageIsBounded(t *testing.T) {
	if m := message("%s", strings.Repeat("ö", 1000)); len(m) > maxMessage || !strings.HasSuffix(m, "ö…") {
		t.Errorf("%d bytes: %s", len(m), m)
	}
}
