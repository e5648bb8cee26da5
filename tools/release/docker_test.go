package main

import (
	"archive/tar"
	"errors"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// archives writes the docker archives of dummy programs.
func archives(t *testing.T, bases map[string]string) (string, error) {
	t.Helper()
	dir := t.TempDir()
	r := &release{version: "v0", time: time.Unix(0, 0), base: filepath.Join(dir, "base"), bases: bases, out: dir}
	bird := filepath.Join(r.base, runtime.GOARCH, "root/usr/sbin/bird")
	if err := os.MkdirAll(filepath.Dir(bird), 0o755); err != nil {
		t.Fatal(err)
	}
	files := []string{bird}
	for _, p := range programs {
		files = append(files, r.binary(p.name, runtime.GOARCH))
	}
	for _, file := range files {
		if err := os.WriteFile(file, []byte(filepath.Base(file)), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return dir, r.writeDockerArchives()
}

// contents returns the files of an image and the capabilities of each, and its user.
func contents(t *testing.T, file, program string) (map[string]string, string) {
	t.Helper()
	tag, err := name.NewTag("vipgate/" + program + ":v0")
	if err != nil {
		t.Fatal(err)
	}
	image, err := tarball.ImageFromPath(file, &tag)
	if err != nil {
		t.Fatal(err)
	}
	config, err := image.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	extracted := mutate.Extract(image)
	defer extracted.Close()
	files := map[string]string{}
	for r := tar.NewReader(extracted); ; {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files, config.Config.User
		}
		if err != nil {
			t.Fatal(err)
		}
		switch header.Typeflag {
		case tar.TypeSymlink:
			files[header.Name] = header.Linkname
		case tar.TypeReg:
			files[header.Name] = header.PAXRecords["SCHILY.xattr.security.capability"]
		}
	}
}

func TestDockerArchives(t *testing.T) {
	t.Chdir("../..")
	plain, err := archives(t, nil)
	if err != nil {
		t.Fatal(err)
	}
	kube := filepath.Join(plain, "kube.tar")
	onBase, err := archives(t, map[string]string{"frontend": filepath.Join(plain, "frontend.tar"), "lb": kube})
	if err != nil {
		t.Fatal(err)
	}
	const names = "cap_net_admin,cap_net_bind_service,cap_net_raw"
	granted, err := encodeCapabilities(names, false)
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{plain, onBase} {
		files, user := contents(t, filepath.Join(dir, "frontend.tar"), "frontend")
		// With capabilities in its file, BIRD does not inherit those of the frontend.
		for file, want := range map[string]string{"usr/sbin/bird": "", "usr/local/bin/frontend": string(granted)} {
			if got, ok := files[file]; !ok || got != want {
				t.Errorf("%s exists: %t, has the capabilities %x, want %x", file, ok, got, want)
			}
		}
		if len(files) != 2 || user != "10002:10002" {
			t.Errorf("files %v, user %s", files, user)
		}
	}
	if files, _ := contents(t, kube, "kube"); len(files) != 1 || files["usr/local/bin/kube"] != "" {
		t.Errorf("files of kube: %v", files)
	}
	admin, err := encodeCapabilities("cap_net_admin", true)
	if err != nil {
		t.Fatal(err)
	}
	files, user := contents(t, filepath.Join(plain, "target.tar"), "target")
	if file := files["usr/local/bin/target"]; len(files) != 1 || file != string(admin) || user != "10003:10003" {
		t.Errorf("files of target: %x, user %s", files, user)
	}
	if granted, err = encodeCapabilities(names, true); err != nil {
		t.Fatal(err)
	}
	wantMeridio(t, plain, granted)
	files, user = contents(t, filepath.Join(onBase, "lb.tar"), "lb")
	if _, ok := files["usr/local/bin/kube"]; !ok || files["usr/local/bin/lb"] == "" || user != "10001:10001" {
		t.Errorf("files of lb on a base: %v, user %s", files, user)
	}
	if _, err := archives(t, map[string]string{"frontend": kube}); err == nil ||
		!strings.Contains(err.Error(), "/usr/sbin/bird") {
		t.Errorf("a base without BIRD: %v", err)
	}
}

// The image that replaces the frontend of Meridio has what its pod and its operators start, at the
// same paths.
func wantMeridio(t *testing.T, dir string, granted []byte) {
	t.Helper()
	files, user := contents(t, filepath.Join(dir, "meridio-frontend.tar"), "meridio-frontend")
	for file, want := range map[string]string{
		"usr/sbin/bird": "", "usr/local/bin/frontend": string(granted), "bin/grpc_health_probe": "",
		"home/meridio/frontend": "/usr/local/bin/frontend", "usr/local/bin/cat": "/bin/busybox",
		"usr/local/bin/ip": "/bin/busybox",
	} {
		if got, ok := files[file]; !ok || got != want {
			t.Errorf("%s of meridio-frontend is there: %v, %q; want %q", file, ok, got, want)
		}
	}
	if user != "10001:10001" {
		t.Errorf("the user of meridio-frontend is %s", user)
	}
}
