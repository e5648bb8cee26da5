// Command release builds a release: static binaries, packages for Debian and RPM, OCI archives of
// images for amd64 and arm64 and of charts, manuals and completions, an SBOM, a provenance
// statement, the notes, and checksums with their signature. With --images it builds only a docker
// archive of each image for this machine's architecture, which docker load, ctr images import and
// kind load image-archive take. Two runs at one commit, with one Go version and the same Debian
// packages, write the same bytes, except for signatures.
package main

import (
	"crypto/sha256"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// program is a command below cmd/.
type program struct {
	name  string
	image bool // it has an image of its own
	host  bool // it is in the packages for hosts
	cli   bool // it has the flag --version, completions and a manual
}

// programs lists everything that is released.
var programs = []program{
	{name: "grpc_health_probe"},
	{name: "meridio-frontend", image: true, cli: true},
	{name: "lb", image: true, host: true, cli: true},
	{name: "frontend", image: true, host: true, cli: true},
	{name: "kube", image: true, cli: true},
	{name: "target", image: true, host: true, cli: true},
	{name: "vipgate", host: true, cli: true},
	{name: "vipgate-probe", image: true, host: true, cli: true},
}

// versionVariable is where the linker writes the version.
const versionVariable = "github.com/vipgate/vipgate/cmd/internal/cli.buildVersion"

// release is what the artifacts are built from and where they go.
type release struct {
	version       string
	time          time.Time // of the commit
	architectures []string
	built         []program         // what is built from source
	base          string            // directory with ARCH/root and ARCH/packages, see base.sh
	bases         map[string]string // by image: a docker archive to build on
	pages         string            // directory of manuals and completions
	binaries      string            // directory of built programs; out when empty
	out           string
}

func main() {
	version := flag.String("version", "", "version of the release, such as v0.1.0")
	base := flag.String("base", "", "directory with the files of BIRD for each architecture")
	out := flag.String("out", "", "directory to write to")
	onlyImages := flag.Bool("images", false, "build only docker archives, for this architecture")
	onlyPackages := flag.Bool("packages", false, "build only packages, for this architecture")
	built := flag.String("binaries", "", "with --packages: directory of programs, instead of building them")
	r := &release{bases: map[string]string{}, built: programs, architectures: []string{"amd64", "arm64"}}
	for _, p := range programs {
		if p.image {
			flag.Func("base-"+p.name, "docker archive of the image that "+p.name+" is built on, with --images",
				func(file string) error { r.bases[p.name] = file; return nil })
		}
	}
	onlyCheck := flag.Bool("check", false, "only check that CHANGELOG.md and the charts have the version")
	onlySign := flag.Bool("sign", false, "only sign the checksums in --out, of a build without the key")
	registry := flag.String("publish", "", "only push the images and charts in --out to this registry, and sign them")
	flag.Parse()
	syscall.Umask(0o022) // the modes of written files are in the archives
	r.version, r.base, r.out = *version, *base, *out
	steps := []func() error{
		r.check, r.writeNotes, r.buildBinaries, r.checkVersions, r.writePages, r.writePackages, r.writeKrew,
		r.writeImages, r.writeCharts, r.writeSBOM, r.writeProvenance, r.writeChecksums, r.signChecksums,
	}
	switch {
	case *onlyCheck:
		steps = []func() error{r.check}
	case *onlySign:
		steps = []func() error{needKey, r.signChecksums}
	case *registry != "":
		steps = []func() error{func() error { return r.publish(*registry) }}
	case *onlyImages:
		r.architectures = []string{runtime.GOARCH}
		steps = []func() error{r.buildBinaries, r.checkVersions, r.writeDockerArchives}
	case *onlyPackages:
		r.architectures = []string{runtime.GOARCH}
		r.built = slices.DeleteFunc(slices.Clone(programs), func(p program) bool { return !p.host })
		steps = []func() error{r.buildBinaries, r.checkVersions, r.writePages, r.writePackages}
		if *built != "" {
			r.binaries = *built
			steps = steps[3:]
		}
	}
	if err := r.run(steps); err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

func (r *release) run(steps []func() error) error {
	seconds, err := exec.Command("git", "log", "-1", "--format=%ct").Output()
	if err != nil {
		return fmt.Errorf("failed to read the time of the commit: %w", err)
	}
	unix, err := strconv.ParseInt(strings.TrimSpace(string(seconds)), 10, 64)
	if err != nil {
		return fmt.Errorf("failed to parse the time of the commit: %w", err)
	}
	if r.out != "" { // a check writes nothing
		if err := os.MkdirAll(r.out, 0o755); err != nil {
			return err
		}
	}
	if r.pages, err = os.MkdirTemp("", "release-pages-"); err != nil {
		return err
	}
	defer os.RemoveAll(r.pages)
	r.time = time.Unix(unix, 0).UTC()
	for _, step := range steps {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// binary is the file of a program for an architecture.
func (r *release) binary(program, arch string) string {
	if r.binaries != "" {
		return filepath.Join(r.binaries, program)
	}
	return filepath.Join(r.out, fmt.Sprintf("%s_%s_linux_%s", program, r.version, arch))
}

func (r *release) buildBinaries() error {
	for _, p := range r.built {
		for _, arch := range r.architectures {
			build := exec.Command("go", "build", "-trimpath", "-buildvcs=true",
				"-ldflags", "-s -w -X "+versionVariable+"="+r.version, "-o", r.binary(p.name, arch), "./cmd/"+p.name)
			// Settings of the developer's environment would end up in the binary.
			build.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH="+arch, "GOAMD64=v1",
				"GOARM64=v8.0",
				"GOFLAGS=", "GOEXPERIMENT=", "GOFIPS140=off")
			build.Stderr = os.Stderr
			if err := build.Run(); err != nil {
				return fmt.Errorf("failed to build %s for %s: %w", p.name, arch, err)
			}
		}
	}
	return nil
}

// checkVersions runs the binaries of this machine's architecture: the linker
// ignores a variable that does not exist.
func (r *release) checkVersions() error {
	for _, p := range r.built {
		if !p.cli {
			continue
		}
		path, err := filepath.Abs(r.binary(p.name, runtime.GOARCH))
		if err != nil {
			return err
		}
		got, err := exec.Command(path, "--version").Output()
		if err != nil {
			return fmt.Errorf("failed to run %s --version: %w", path, err)
		}
		if v := strings.TrimSpace(string(got)); v != r.version {
			return fmt.Errorf("%s --version is %q, not %q", path, v, r.version)
		}
	}
	return nil
}

var tag = regexp.MustCompile(`^v\d+\.\d+\.\d+$`)

// check requires what a release needs from the repository, before anything is built.
func (r *release) check() error {
	if _, err := r.notes(); err != nil {
		return err
	}
	return r.checkCharts()
}

// writeNotes writes the section of the version in CHANGELOG.md.
func (r *release) writeNotes() error {
	section, err := r.notes()
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(r.out, "NOTES.md"), []byte("# vipgate "+r.version+"\n\n"+section), 0o644)
}

// notes returns the section of the version; of the unreleased changes without a tagged release.
func (r *release) notes() (string, error) {
	text, err := os.ReadFile("CHANGELOG.md")
	if err != nil {
		return "", err
	}
	heading := "Unreleased"
	if tag.MatchString(r.version) {
		heading = r.version
	}
	return notes(string(text), heading)
}

// notes returns the section of a changelog under a heading, which a date may follow.
func notes(changelog, heading string) (string, error) {
	var section strings.Builder
	inside := false
	for line := range strings.Lines(changelog) {
		if title, ok := strings.CutPrefix(line, "## "); ok {
			inside = strings.Fields(title + " -")[0] == heading
			continue
		}
		if inside {
			section.WriteString(line)
		}
	}
	text := strings.TrimSpace(section.String())
	if text == "" {
		return "", fmt.Errorf("CHANGELOG.md has no section %q; rename the section of the unreleased changes", heading)
	}
	return text + "\n", nil
}

const checksums = "SHA256SUMS"

func (r *release) writeChecksums() error {
	const name = checksums
	entries, err := os.ReadDir(r.out)
	if err != nil {
		return err
	}
	var sums strings.Builder
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), name) {
			continue // and its signature
		}
		data, err := os.ReadFile(filepath.Join(r.out, e.Name()))
		if err != nil {
			return err
		}
		fmt.Fprintf(&sums, "%x  %s\n", sha256.Sum256(data), e.Name())
	}
	return os.WriteFile(filepath.Join(r.out, name), []byte(sums.String()), 0o644)
}
