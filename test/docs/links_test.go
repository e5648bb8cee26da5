package docs

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var linkPattern = regexp.MustCompile(`\]\(([^()\s]+)\)`)

func TestRelativeLinks(t *testing.T) {
	for _, d := range documents(t) {
		for _, l := range d.prose {
			for _, m := range linkPattern.FindAllStringSubmatch(inlinePattern.ReplaceAllString(l.text, ""), -1) {
				if strings.Contains(m[1], "://") || strings.HasPrefix(m[1], "mailto:") {
					continue
				}
				path, anchor, _ := strings.Cut(m[1], "#")
				target := d.path
				if path != "" {
					target = filepath.Join(filepath.Dir(d.path), path)
				}
				if _, err := os.Stat(target); err != nil {
					t.Errorf("%s:%d: link to %s: %v", d.path, l.number, m[1], err)
					continue
				}
				if anchor != "" && strings.HasSuffix(target, ".md") && !read(t, target).anchors()[anchor] {
					t.Errorf("%s:%d: link to %s: no such heading", d.path, l.number, m[1])
				}
			}
		}
	}
}

// sourcePath matches inline code that names a file or folder of the repository.
var sourcePath = regexp.MustCompile(`^(?:charts|cmd|deployments|docs|pkg|proto|test|tools)/[\w./*-]*$`)

func TestMentionedSourcesExist(t *testing.T) {
	mentioned := 0
	for _, d := range documents(t) {
		for _, l := range d.prose {
			for _, name := range code(l.text) {
				if !sourcePath.MatchString(name) {
					continue
				}
				mentioned++
				if found, err := filepath.Glob(filepath.Join(root, name)); err != nil || len(found) == 0 {
					t.Errorf("%s:%d: %s does not exist (%v)", d.path, l.number, name, err)
				}
			}
		}
	}
	if mentioned < 100 {
		t.Errorf("found only %d files and folders", mentioned)
	}
}
