package translation_test

import (
	"bytes"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/rogpeppe/go-internal/txtar"

	"github.com/vipgate/vipgate/pkg/kube/translation"
	"github.com/vipgate/vipgate/pkg/trench"
	trenchfile "github.com/vipgate/vipgate/pkg/trench/file"
)

var update = flag.Bool("update", false, "write the golden files instead of comparing them")

var options = translation.Options{KeyDir: "/run/vipgate/keys"}

// read returns the objects of a text.
func read(t testing.TB, text []byte) translation.Objects {
	t.Helper()
	var o translation.Objects
	if err := o.Read(bytes.NewReader(text)); err != nil {
		t.Fatal(err)
	}
	return o
}

// base is the common start of all cases: a Trench that uses most fields, and two Pods.
func base(t testing.TB) []byte {
	t.Helper()
	b, err := os.ReadFile("testdata/base.yaml")
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// cases maps names to golden files: objects.yaml, which is appended to base.yaml unless it has a
// Trench, and the results.
func cases(t testing.TB) map[string]*txtar.Archive {
	t.Helper()
	names, err := filepath.Glob("testdata/*.txtar")
	if err != nil || len(names) == 0 {
		t.Fatal(names, err)
	}
	all := map[string]*txtar.Archive{}
	for _, name := range names {
		a, err := txtar.ParseFile(name)
		if err != nil {
			t.Fatal(err)
		}
		all[name] = a
	}
	return all
}

func objectsOf(t testing.TB, a *txtar.Archive) translation.Objects {
	t.Helper()
	text := a.Files[0].Data
	if !bytes.Contains(text, []byte("kind: Trench")) && a.Files[0].Name == "objects.yaml" {
		text = append(append(base(t), "---\n"...), text...)
	}
	return read(t, text)
}

// shown returns the result as the content of golden files.
func shown(r translation.Result) []txtar.File {
	var files []txtar.File
	if r.File != nil {
		files = append(files, txtar.File{Name: "trench.yaml", Data: r.File})
	}
	for _, name := range slices.Sorted(maps.Keys(r.Keys)) {
		files = append(files, txtar.File{Name: "keys/" + name, Data: append(r.Keys[name], '\n')})
	}
	return append(files, txtar.File{Name: "verdicts", Data: []byte(r.Table())})
}

func TestGolden(t *testing.T) {
	for name, a := range cases(t) {
		t.Run(strings.TrimSuffix(filepath.Base(name), ".txtar"), func(t *testing.T) {
			r := translation.Translate(objectsOf(t, a), options)
			if r.File != nil {
				if _, err := trenchfile.Parse("trench.yaml", r.File, trench.DefaultDefaults()); err != nil {
					t.Error(err)
				}
			}
			// The user does not have the trench file.
			if line := regexp.MustCompile(`\bline \d`).FindString(r.Table()); line != "" {
				t.Errorf("a verdict names %s of the trench file", line)
			}
			got := &txtar.Archive{Comment: a.Comment, Files: append(a.Files[:1:1], shown(r)...)}
			if *update {
				if err := os.WriteFile(name, txtar.Format(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			if d := cmp.Diff(string(txtar.Format(a)), string(txtar.Format(got))); d != "" && !*update {
				t.Errorf("run go test -update, if this is as desired:\n%s", d)
			}
		})
	}
}

func shuffle(random *rand.Rand, o translation.Objects) {
	random.Shuffle(len(o.Services), func(i, j int) { o.Services[i], o.Services[j] = o.Services[j], o.Services[i] })
	random.Shuffle(len(o.Pods), func(i, j int) { o.Pods[i], o.Pods[j] = o.Pods[j], o.Pods[i] })
	random.Shuffle(len(o.Secrets), func(i, j int) { o.Secrets[i], o.Secrets[j] = o.Secrets[j], o.Secrets[i] })
	s := o.EndpointSlices
	random.Shuffle(len(s), func(i, j int) { s[i], s[j] = s[j], s[i] })
}

func TestOrderOfObjectsDoesNotMatter(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for name, a := range cases(t) {
		o := objectsOf(t, a)
		want := translation.Translate(o, options)
		for range 20 {
			shuffle(random, o)
			got := translation.Translate(o, options)
			if d := cmp.Diff(fmt.Sprintf("%s", shown(want)), fmt.Sprintf("%s", shown(got))); d != "" {
				t.Fatalf("%s: %s", name, d)
			}
		}
	}
}
