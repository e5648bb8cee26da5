package secret

import (
	"path/filepath"
	"strings"
	"testing"
)

func TestCheck(t *testing.T) {
	long := strings.Repeat("a", 253)
	for _, c := range []struct {
		source, key string
		problem     string // "" for none
	}{
		{"bgp-auth", "gateway-v4-a-1-key", ""},
		{"a.b-c.9", "A_b.C-9", ""},
		{long, long[:247], ""},
		{"a", ".hidden", ""},
		{"a", "..", `".." is not a key`},
		{"a", ".", `"." is not a key`},
		{"a", "..data", `"..data" is not a key`},
		{"a", "", `"" is not a key`},
		{"a", "x/y", `"x/y" is not a key`},
		{"a", "x\n", `"x\n" is not a key`},
		{"a", long[:248], "is not a key"},
		{"", "x", `"" is not the name`},
		{"..", "x", `".." is not the name`},
		{".", "x", `"." is not the name`},
		{"../a", "x", `"../a" is not the name`},
		{"a/b", "x", `"a/b" is not the name`},
		{"a..b", "x", `"a..b" is not the name`},
		{"A", "x", `"A" is not the name`},
		{"-a", "x", `"-a" is not the name`},
		{"a\n", "x", `"a\n" is not the name`},
		{long + "a", "x", "is not the name"},
	} {
		err := Check(c.source, c.key)
		if (err == nil) != (c.problem == "") || err != nil && !strings.Contains(err.Error(), c.problem) {
			t.Errorf("Check(%q, %q): %v, want %q", c.source, c.key, err, c.problem)
		}
	}
}

func TestCheckNamespace(t *testing.T) {
	for name, valid := range map[string]bool{
		"default": true, strings.Repeat("a", 63): true, strings.Repeat("a", 64): false, "": false, "a.b": false,
		"A": false, "../a": false, "a?x": false,
	} {
		if err := CheckNamespace(name); (err == nil) != valid {
			t.Errorf("CheckNamespace(%q): %v", name, err)
		}
	}
}

func TestFileNames(t *testing.T) {
	w := New(Options{Dir: "/dir"})
	seen := map[string]bool{}
	for _, c := range [][2]string{
		{"a.b", "c"}, {"a", "b.c"}, {"a", "c"}, {"a", "c.key"}, {"a", "c.key.tmp"}, {"a", "c.tmp"},
	} {
		path := w.File(c[0], c[1])
		for _, p := range []string{path, path + ".tmp"} {
			if seen[p] {
				t.Errorf("%s is used twice", p)
			}
			seen[p] = true
		}
	}
	if got := w.File("bgp-auth", "gw-a"); got != "/dir/keys/bgp-auth/gw-a.key" {
		t.Errorf("file %s", got)
	}
}

func FuzzFile(f *testing.F) {
	f.Add("a", "b")
	f.Add("../a", "..")
	f.Fuzz(func(t *testing.T, source, key string) {
		w := New(Options{Dir: "/dir"})
		path := w.File(source, key)
		if Check(source, key) != nil {
			if path != "/dir/keys/.invalid" {
				t.Errorf("%q, %q: %s", source, key, path)
			}
			return
		}
		temporary := filepath.Base(path) + ".tmp"
		if path != filepath.Clean(path) || filepath.Dir(filepath.Dir(path)) != "/dir/keys" || len(temporary) > 255 {
			t.Errorf("%q, %q: %s", source, key, path)
		}
	})
}
