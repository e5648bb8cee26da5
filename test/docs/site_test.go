package docs

import (
	"encoding/json"
	"errors"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

var (
	attributePattern = regexp.MustCompile(`\s(?:href|src)="?([^"\s>]*)`)
	idPattern        = regexp.MustCompile(`\sid="?([^"\s>]*)`)
	// loadedPattern matches files that a browser loads with the page.
	loadedPattern = regexp.MustCompile(`<(?:script|img|link)\s[^>]*(?:src|href)="?(?:https?:)?//`)
)

// TestSite builds the site with two versions. Links between documents work there as on GitHub, to
// the heading, and a browser loads nothing from another server.
func TestSite(t *testing.T) {
	lab.Need(t, "mkdocs")
	if out, err := exec.CommandContext(t.Context(), "git", "-C", root, "rev-parse", "HEAD").CombinedOutput(); err != nil {
		lab.Skip(t, "a Git repository: "+string(out))
	}
	site := t.TempDir()
	out, err := exec.CommandContext(t.Context(), filepath.Join(root, "tools/site/build.sh"), site, "HEAD").CombinedOutput()
	if err != nil {
		t.Fatalf("build.sh: %v\n%s", err, out)
	}
	for _, version := range []string{"main", "HEAD"} {
		pages := readPages(t, filepath.Join(site, version))
		if want := len(documents(t)) - githubOnly; version == "main" && len(pages) != want {
			t.Errorf("%d pages for %d documents", len(pages), want)
		}
		for file, p := range pages {
			if loaded := loadedPattern.FindString(p.text); loaded != "" {
				t.Errorf("%s loads a file from another server: %s", file, loaded)
			}
			for _, m := range attributePattern.FindAllStringSubmatch(p.text, -1) {
				if err := checkLink(pages, file, m[1]); err != nil {
					t.Errorf("%s: link to %s: %v", file, m[1], err)
				}
			}
		}
		index, err := os.ReadFile(filepath.Join(site, version, "search/search_index.json"))
		harness.Must(t, err)
		if !strings.Contains(string(index), "docs/operations/#no-gateway-is-up") {
			t.Errorf("%s: the search does not find a heading of the first aid", version)
		}
	}
	var versions []struct{ Version string }
	text, err := os.ReadFile(filepath.Join(site, "versions.json"))
	harness.Must(t, err)
	harness.Must(t, json.Unmarshal(text, &versions))
	if len(versions) != 2 || versions[0].Version != "main" || versions[1].Version != "HEAD" {
		t.Errorf("the versions to select are %v", versions)
	}
}

// githubOnly is the number of documents that only GitHub shows: templates of issues and changes.
const githubOnly = 3

// page is a page of the site.
type page struct {
	text string
	ids  map[string]bool
}

// readPages returns each page by its file.
func readPages(t *testing.T, site string) map[string]page {
	t.Helper()
	pages := map[string]page{}
	harness.Must(t, filepath.WalkDir(site, func(path string, _ os.DirEntry, err error) error {
		if err != nil || filepath.Base(path) != "index.html" {
			return err
		}
		text, err := os.ReadFile(path)
		ids := map[string]bool{}
		for _, m := range idPattern.FindAllSubmatch(text, -1) {
			ids[string(m[1])] = true
		}
		pages[path] = page{string(text), ids}
		return err
	}))
	return pages
}

// checkLink returns what is wrong with a relative link: no file, or no heading of its fragment.
func checkLink(pages map[string]page, file, link string) error {
	u, err := url.Parse(link)
	if err != nil || u.Host != "" || u.Scheme != "" {
		return err
	}
	target := file
	if u.Path != "" {
		target = filepath.Join(filepath.Dir(file), u.Path)
	}
	if info, err := os.Stat(target); err != nil {
		return err
	} else if info.IsDir() {
		target = filepath.Join(target, "index.html")
	}
	if u.Fragment != "" && !pages[target].ids[u.Fragment] {
		return errors.New("no such heading")
	}
	return nil
}
