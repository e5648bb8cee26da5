package main

import (
	"bytes"
	"encoding/xml"
	"errors"
	"flag"
	"io"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/test/harness"
)

var update = flag.Bool("update", false, "write the plots in testdata instead of comparing them")

// maxPlot is the maximum size of an SVG in bytes, so that pages load quickly.
const maxPlot = 30 << 10

// TestPlotsOfJSON draws from a small run. After a change of the renderer, run it with -update
// and inspect the SVGs.
func TestPlotsOfJSON(t *testing.T) {
	r, err := loadReport("testdata/bench.json")
	harness.Must(t, err)
	dir := t.TempDir()
	if *update {
		dir = "testdata"
	}
	drawn, err := r.drawPlots(dir)
	harness.Must(t, err)
	if len(drawn) != len(figures) {
		t.Errorf("drawn: %v", drawn)
	}
	for _, path := range drawn {
		got, want := readPlot(t, path), readPlot(t, filepath.Join("testdata", filepath.Base(path)))
		if !bytes.Equal(got, want) {
			t.Errorf("%s differs; look at what -update writes", filepath.Base(path))
		}
		checkSVG(t, path, got)
	}
}

func TestPlotsOfPart(t *testing.T) {
	r := &report{Results: []*result{{
		Measurement: Measurement{Row: 1, What: oneFlips, Method: vipgate, N: 1},
		Summary:     Summary{Median: 1, P99: 1},
	}, {
		Measurement: Measurement{Row: 2, What: allDown, Method: vipgate, N: 1},
		Summary:     Summary{}, // no logarithm
	}}}
	drawn, err := r.drawPlots(t.TempDir())
	if err != nil || len(drawn) != 1 || filepath.Base(drawn[0]) != "one-flip.svg" {
		t.Fatalf("drawn: %v, %v", drawn, err)
	}
	text := readPlot(t, drawn[0])
	checkSVG(t, drawn[0], text)
	if bytes.Contains(text, []byte("NaN")) || bytes.Contains(text, []byte("Inf")) {
		t.Errorf("%s", text)
	}
}

func TestPlotsOfUnreadableResults(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.json")
	harness.Must(t, os.WriteFile(path, []byte("{"), 0o600))
	for _, path := range []string{path, path + ".missing"} {
		var out, errs bytes.Buffer
		if status := run(options{From: path, Plots: t.TempDir()}, &out, &errs); status != exitFailed ||
			!strings.Contains(errs.String(), path) {
			t.Errorf("status %d, %q", status, errs.String())
		}
	}
}

// TestDocumentedPlots checks the plots that the documents show.
func TestDocumentedPlots(t *testing.T) {
	const root = "../.."
	image := regexp.MustCompile(`!\[([^\]]+)\]\(([^)]+\.svg)\)`)
	for document, want := range map[string][]string{
		"README.md":           {"docs/plots/one-flip.svg"},
		"docs/performance.md": {"plots/one-flip.svg", "plots/all-flip.svg"},
	} {
		text, err := os.ReadFile(filepath.Join(root, document))
		harness.Must(t, err)
		var shown []string
		for _, m := range image.FindAllStringSubmatch(string(text), -1) {
			shown = append(shown, m[2])
		}
		if !slices.Equal(shown, want) {
			t.Errorf("%s shows %v, want %v", document, shown, want)
		}
	}
	for _, f := range figures {
		path := filepath.Join(root, "docs/plots", f.file)
		checkSVG(t, path, readPlot(t, path))
	}
}

func readPlot(t *testing.T, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	harness.Must(t, err)
	return b
}

// checkSVG checks that an SVG is well-formed, small, and neither runs nor loads anything.
func checkSVG(t *testing.T, path string, text []byte) {
	t.Helper()
	if len(text) > maxPlot {
		t.Errorf("%s has %d bytes", path, len(text))
	}
	d := xml.NewDecoder(bytes.NewReader(text))
	for first := true; ; {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			t.Errorf("%s: %v", path, err)
			return
		}
		e, ok := token.(xml.StartElement)
		if !ok {
			continue
		}
		if first && e.Name.Local != "svg" || slices.Contains([]string{"script", "image", "use", "style"}, e.Name.Local) {
			t.Errorf("%s: element %s", path, e.Name.Local)
		}
		first = false
		for _, a := range e.Attr {
			if a.Name.Local == "href" || strings.HasPrefix(a.Name.Local, "on") {
				t.Errorf("%s: attribute %s", path, a.Name.Local)
			}
		}
	}
}

func TestGroupedNumber(t *testing.T) {
	for n, want := range map[int]string{1: "1", 100: "100", 1000: "1 000", 50_000: "50 000", 1234567: "1 234 567"} {
		if got := grouped(n); got != want {
			t.Errorf("grouped(%d) = %q, want %q", n, got, want)
		}
	}
}

func TestAxisBounds(t *testing.T) {
	for v, want := range map[float64][2]float64{
		1: {1, 1}, 1.5: {1, 2}, 4.9: {2, 5}, 7: {5, 10}, 112: {100, 200}, 0.24: {0.2, 0.5}, 0.1: {0.1, 0.1},
	} {
		if got := [2]float64{below(v), above(v)}; math.Abs(got[0]-want[0])+math.Abs(got[1]-want[1]) > 1e-9 {
			t.Errorf("bounds of %v: %v, want %v", v, got, want)
		}
	}
}
