package docs

import (
	"encoding/json"
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
	if _, err := exec.LookPath("mkdocs"); err != nil {
		lab.Skip(t, "mkdocs (Debian: mkdocs-material)")
	}
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
		for page, text := range pages {
			if loaded := loadedPattern.FindString(text); loaded != "" {
				t.Errorf("%s loads a file from another server: %s", page, loaded)
			}
			for _, m := range attributePattern.FindAllStringSubmatch(text, -1) {
				checkLink(t, pages, page, m[1])
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

// readPages returns the text of each page by its file.
func readPages(t *testing.T, site string) map[string]string {
	t.Helper()
	pages := map[string]string{}
	harness.Must(t, filepath.WalkDir(site, func(path string, _ os.DirEntry, err error) error {
		if err != nil || filepath.Base(path) != "index.html" {
			return err
		}
		text, err := os.ReadFile(path)
		pages[path] = string(text)
		return err
	}))
	return pages
}

// checkLink reports a relative link without a file, or without a heading of its fragment.
func checkLink(t *testing.T, pages map[string]string, page, link string) {
	t.Helper()
	u, err := url.Parse(link)
	if err != nil {
		t.Errorf("%s: link to %s: %v", page, link, err)
	}
	if err != nil || u.Host != "" || u.Scheme != "" {
		return
	}
	target := page
	if u.Path != "" {
		target = filepath.Join(filepath.Dir(page), u.Path)
		if info, err := os.Stat(target); err != nil {
			t.Errorf("%s: link to %s: %v", page, link, err)
			return
		} else if info.IsDir() {
			target = filepath.Join(target, "index.html")
		}
	}
	if u.Fragment == "" {
		return
	}
	for _, id := range idPattern.FindAllStringSubmatch(pages[target], -1) {
		if id[1] == u.Fragment {
			return
		}
	}
	t.Errorf("%s: link to %s: no such heading", page, link)
}
