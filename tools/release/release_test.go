package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestNotes(t *testing.T) {
	const changelog = "# Changelog\n\n## Unreleased\n\n- new\n\n## v0.2.0 - 2026-12-01\n\n- two\n  lines\n\n## " +
		"v0.1.0\n\n- first\n"
	for heading, want := range map[string]string{
		"Unreleased": "- new\n", "v0.2.0": "- two\n  lines\n", "v0.1.0": "- first\n", "v0.3.0": "",
	} {
		got, err := notes(changelog, heading)
		if got != want || (err == nil) != (want != "") {
			t.Errorf("%s: got %q, %v", heading, got, err)
		}
	}
}

// The expected bytes are those of setcap cap_net_admin,cap_net_raw+ep, and +p.
func TestCapabilities(t *testing.T) {
	want := []byte{1, 0, 0, 2, 0, 0x30, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}
	for _, effective := range []bool{true, false} {
		if !effective {
			want[0] = 0
		}
		if got, err := encodeCapabilities("cap_net_admin,cap_net_raw", effective); err != nil || !bytes.Equal(got, want) {
			t.Fatalf("got %x, %v; want %x", got, err, want)
		}
	}
	if _, err := encodeCapabilities("cap_sys_nice", true); err == nil {
		t.Fatal("an unknown capability is accepted")
	}
}

func TestDockerfiles(t *testing.T) {
	for program, files := range map[string][]string{
		"lb":            {"/usr/local/bin/lb"},
		"frontend":      {"/usr/local/bin/frontend"}, // BIRD inherits them
		"kube":          {},
		"target":        {"/usr/local/bin/target"},
		"vipgate-probe": {},
	} {
		spec, err := readDockerfile("../../deployments/images/" + program + ".Dockerfile")
		if err != nil {
			t.Fatal(err)
		}
		if spec.binaries["/usr/local/bin/"+program] != program || len(spec.binaries) != 1 {
			t.Errorf("%s: programs %v", program, spec.binaries)
		}
		if len(spec.capabilities) != len(files) || spec.config.User == "" ||
			spec.config.Entrypoint[0] != "/usr/local/bin/"+program {
			t.Errorf("%s: %+v", program, spec)
		}
		if spec.bird != (program == "frontend") {
			t.Errorf("%s has BIRD: %t", program, spec.bird)
		}
		for _, file := range files {
			if spec.capabilities[file] == nil {
				t.Errorf("%s: no capabilities for %s", program, file)
			}
		}
	}
}

func TestDockerfileOfMeridio(t *testing.T) {
	spec, err := readDockerfile("../../deployments/images/meridio-frontend.Dockerfile")
	if err != nil {
		t.Fatal(err)
	}
	// Of the last stage, not of the one that builds.
	if spec.config.WorkingDir != "/home/meridio" || spec.config.Entrypoint[0] != "./frontend" {
		t.Errorf("%s in %s", spec.config.Entrypoint, spec.config.WorkingDir)
	}
	if spec.binaries["/bin/grpc_health_probe"] != "grpc_health_probe" ||
		spec.binaries["/usr/local/bin/frontend"] != "meridio-frontend" || spec.links["/home/meridio/frontend"] == "" {
		t.Errorf("programs %v, links %v", spec.binaries, spec.links)
	}
}

// Two runs write the same bytes, with the modules of the programs and the packages of Debian.
func TestSBOM(t *testing.T) {
	write := func() string {
		dir := t.TempDir()
		r := &release{version: "v0", time: time.Unix(0, 0).UTC(), base: dir, out: dir, architectures: []string{"amd64"}}
		for _, p := range programs {
			// The test itself has the build information of a program.
			if err := os.Symlink("/proc/self/exe", r.binary(p.name, "amd64")); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.Mkdir(filepath.Join(dir, "amd64"), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "amd64/packages"), []byte("bird2 2.0.12-7\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := r.writeSBOM(); err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(filepath.Join(dir, "vipgate-v0.spdx.json"))
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	text := write()
	for _, want := range []string{
		`"SPDXID": "SPDXRef-DOCUMENT"`, `"created": "1970-01-01T00:00:00Z"`, `"SPDXRef-lb-v0-linux-amd64"`,
		`"pkg:golang/github.com/google/go-containerregistry@`, `"pkg:deb/debian/bird2@2.0.12-7?arch=amd64"`,
		`"relationshipType": "CONTAINS"`, `"Tool: vipgate-tools-release"`,
	} {
		if !strings.Contains(text, want) {
			t.Errorf("the SBOM lacks %s", want)
		}
	}
	if write() != text {
		t.Error("a second run writes another SBOM")
	}
}
