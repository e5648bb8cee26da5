package main

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// Two runs write the same packages, which have every program of a host and no enabled unit.
func TestPackages(t *testing.T) {
	t.Chdir("../..")
	write := func() string {
		r := &release{
			version: "v0.1.0", time: time.Unix(0, 0), out: t.TempDir(), binaries: t.TempDir(),
			architectures: []string{"amd64"},
		}
		for _, p := range programs {
			if err := os.WriteFile(filepath.Join(r.binaries, p.name), []byte(p.name), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		for _, step := range []func() error{r.writePackages, r.writeKrew} {
			if err := step(); err != nil {
				t.Fatal(err)
			}
		}
		return r.out
	}
	first, second := write(), write()
	for _, file := range []string{"vipgate_0.1.0-1_amd64.deb", "vipgate-0.1.0-1.x86_64.rpm", "kubectl-vipgate.yaml"} {
		a, err := os.ReadFile(filepath.Join(first, file))
		if err != nil {
			t.Fatal(err)
		}
		if b, err := os.ReadFile(filepath.Join(second, file)); err != nil || !bytes.Equal(a, b) {
			t.Errorf("a second run writes another %s: %v", file, err)
		}
	}
	// The manifest has the checksum of the archive.
	archive := filepath.Join(first, "kubectl-vipgate_linux_amd64.tar.gz")
	content, err := os.ReadFile(archive)
	if err != nil {
		t.Fatal(err)
	}
	manifest, err := os.ReadFile(filepath.Join(first, "kubectl-vipgate.yaml"))
	if sum := fmt.Sprintf("sha256: %x", sha256.Sum256(content)); err != nil || !strings.Contains(string(manifest), sum) ||
		!strings.Contains(string(manifest), "/download/v0.1.0/") || strings.Contains(string(manifest), "LINUX_AMD64") {
		t.Errorf("the manifest lacks %s, %v:\n%s", sum, err, manifest)
	}
	files, err := exec.CommandContext(t.Context(), "tar", "-tzf", archive).Output()
	if err != nil || string(files) != "LICENSE\nkubectl-vipgate\n" {
		t.Errorf("the plugin's archive has %q, %v", files, err)
	}
	list := func(args ...string) string {
		args = append(args, filepath.Join(first, "vipgate_0.1.0-1_amd64.deb"))
		out, err := exec.CommandContext(t.Context(), "dpkg-deb", args...).Output()
		if err != nil {
			t.Fatal(err)
		}
		return string(out)
	}
	contents := list("--contents")
	for _, want := range []string{
		"./usr/lib/vipgate/frontend\n", "./usr/bin/vipgate-lb -> /usr/lib/vipgate/lb\n", "./usr/bin/vipgate -> ",
		"./usr/bin/kubectl-vipgate -> ", "./usr/lib/systemd/system/vipgate-frontend.service\n", "./etc/vipgate/trench.yaml\n",
	} {
		if !strings.Contains(contents, want) {
			t.Errorf("the package lacks %q:\n%s", want, contents)
		}
	}
	if strings.Contains(contents, ".wants/") || strings.Contains(contents, "/kube\n") {
		t.Errorf("the package enables a unit, or has a program of the cluster:\n%s", contents)
	}
	if depends := list("--field"); !strings.Contains(depends, "Depends: bird2 (>= 2.0.12), iproute2\n") {
		t.Errorf("dependencies:\n%s", depends)
	}
}

func TestPackageVersion(t *testing.T) {
	for version, want := range map[string]string{
		"v0.1.0": "0.1.0", "v0.1.0-3-gabc-dirty": "0~v0.1.0.3.gabc.dirty", "77a787": "0~77a787",
	} {
		if got := packageVersion(version); got != want {
			t.Errorf("%s: got %s, want %s", version, got, want)
		}
	}
}
