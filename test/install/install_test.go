package install

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// buildPackage builds the package of the programs as they are, and returns its file.
func buildPackage(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	programs, err := lab.Programs()
	harness.Must(t, err)
	command(t, "go", "build", "-C", root+"/tools/release", "-o", dir+"/release", ".")
	command(t, "env", "-C", root, dir+"/release", "--packages", "--version=v0.0.0", "--binaries="+programs, "--out="+dir)
	files, err := filepath.Glob(dir + "/vipgate_*.deb")
	if err != nil || len(files) != 1 {
		t.Fatalf("packages %v, %v", files, err)
	}
	return files[0]
}

// scripts returns the blocks of commands of a document for a test.
func scripts(t *testing.T, document, test string, count int) []string {
	t.Helper()
	text, err := os.ReadFile(root + "/" + document)
	harness.Must(t, err)
	var found []string
	block := regexp.MustCompile("(?ms)^```sh run-by-test=" + test + "\n(.*?)^```")
	for _, match := range block.FindAllStringSubmatch(string(text), -1) {
		found = append(found, match[1])
	}
	if len(found) != count {
		t.Fatalf("%s has %d blocks of commands for the test %s, want %d", document, len(found), test, count)
	}
	return found
}

// The commands of the page, from an empty machine to its end, and those of the README.
func TestInstall(t *testing.T) {
	scripts := scripts(t, "docs/install.md", "machine", 5)
	deb := buildPackage(t)
	m := boot(t)
	data, err := os.ReadFile(deb)
	harness.Must(t, err)
	harness.Must(t, os.WriteFile(m.home(filepath.Base(deb)), data, 0o600))
	t.Cleanup(func() {
		if t.Failed() {
			out, _ := m.run(harness.Context(t, commandTimeout),
				"set +e; journalctl --no-pager -n 60 -u 'vipgate-*'; cat /tmp/log; ip netns")
			t.Log(out)
		}
	})

	m.want(t, scripts[0], "")
	// Nothing runs, and nothing will at the next boot.
	m.want(t, "! systemctl --quiet is-active vipgate-lb vipgate-frontend vipgate-target vipgate-probe\n"+
		"! systemctl --quiet is-enabled vipgate-lb vipgate-frontend vipgate-target", "")
	m.want(t, scripts[1], "vipgate-gateway-a-1")
	m.want(t, scripts[2], "")
	out := m.eventually(t, scripts[3])
	for _, want := range []string{"2 of 2 VIPs advertised", "20.0.0.1/32 ", "via 169.254.100.1 ", "target-"} {
		if !strings.Contains(out, want) {
			t.Errorf("the output lacks %q:\n%s", want, out)
		}
	}
	// Without root, and with no more capabilities than the units name.
	m.want(t, "stat -c %U /proc/$(systemctl show --value -p MainPID vipgate-lb)", "vipgate\n")
	// An orderly stop: BIRD runs until the VIPs are withdrawn.
	m.want(t, "systemctl stop vipgate-frontend && journalctl -q -u vipgate-frontend",
		"from=depreferred to=withdrawn reason=stopping")
	m.want(t, scripts[4], "")
	m.want(t, "ip netns; ls -d /run/vipgate-* /run/systemd/system/vipgate-* 2>/dev/null || true", "")
	m.want(t, "apt-get -qq remove vipgate >/dev/null 2>&1\n"+
		"ls /usr/lib/vipgate /usr/lib/systemd/system/vipgate-* 2>/dev/null || true", "")
	m.readme(t)
}

// TestTwoCommands runs the commands of the README in a clone on a machine with Go, make and git. Of
// the tests one package runs.
func TestTwoCommands(t *testing.T) {
	commands := scripts(t, "README.md", "two-commands", 1)[0]
	clone := t.TempDir()
	command(t, "bash", "-euo", "pipefail", "-c", `
		cd "$1"
		git ls-files -z --cached --others --exclude-standard |
			while IFS= read -rd "" file; do [ ! -e "$file" ] || printf "%s\0" "$file"; done |
			tar --null -T - -cf - | tar -C "$2" -xf -`, "bash", root, clone)
	mounts := []string{clone, filepath.Join(home, "vipgate")}
	for variable, path := range map[string]string{
		"GOROOT": "/usr/local/go", "GOCACHE": filepath.Join(home, ".cache/go-build"),
		"GOMODCACHE": filepath.Join(home, "go/pkg/mod"),
	} {
		folder, err := exec.CommandContext(t.Context(), "go", "env", variable).Output()
		harness.Must(t, err)
		mounts = append(mounts, strings.TrimSpace(string(folder)), path)
	}
	m := boot(t, mounts...)
	m.want(t, "apt-get -qq install --no-install-recommends make git >/dev/null 2>&1", "")
	ctx := harness.Context(t, timeout)
	for line := range strings.Lines(commands) {
		out, err := m.run(ctx, "export PATH=$PATH:/usr/local/go/bin PACKAGES=./pkg/vip; cd vipgate; "+line)
		if err != nil {
			t.Fatalf("%s%v\n%s", line, err, out)
		}
		if strings.HasPrefix(line, "make test") && !strings.Contains(out, "nothing was skipped") {
			t.Errorf("%s%s", line, out)
		}
	}
}

// readme runs the example of the README, without the package.
func (m *machine) readme(t *testing.T) {
	t.Helper()
	scripts := scripts(t, "README.md", "quickstart", 2)
	programs, err := lab.Programs()
	harness.Must(t, err)
	bin := m.home("bin") + "/"
	harness.Must(t, os.Mkdir(bin, 0o700))
	for _, program := range []string{"lb", "frontend", "vipgate"} {
		data, err := os.ReadFile(filepath.Join(programs, program))
		harness.Must(t, err)
		harness.Must(t, os.WriteFile(bin+program, data, 0o700))
	}
	// A killed run, and one over another.
	m.want(t, "timeout -s KILL 0.2 bin/vipgate quickstart || true\nbin/vipgate quickstart", "remove")
	m.want(t, "exec >/tmp/log 2>&1\n"+scripts[0], "")
	out := m.eventually(t, strings.TrimSuffix(scripts[1], "bin/vipgate quickstart --down\n"))
	if !strings.Contains(out, "2 of 2 VIPs advertised") || !strings.Contains(out, "target-") {
		t.Errorf("the example of the README does not get green:\n%s", out)
	}
	example, err := os.ReadFile(root + "/cmd/vipgate/quickstart/trench.yaml")
	harness.Must(t, err)
	readme, err := os.ReadFile(root + "/README.md")
	harness.Must(t, err)
	if !strings.Contains(string(readme), "```yaml file=trench.yaml\n"+string(example)+"```") {
		t.Error("the README has another trench file than cmd/vipgate/quickstart/trench.yaml")
	}
	m.want(t, "bin/vipgate quickstart --down", "")
	m.want(t, "ip netns; cat /proc/[0-9]*/comm | grep -xE 'lb|frontend|vipgate' || true", "")
}

// want runs a script that must succeed and print a text; nothing at all if its last line hides
// errors and text is empty.
func (m *machine) want(t *testing.T, script, text string) {
	t.Helper()
	out, err := m.run(harness.Context(t, commandTimeout), script)
	if err != nil || !strings.Contains(out, text) || strings.HasSuffix(script, "|| true") && out != "" {
		t.Fatalf("%s%v, want %q\n%s", script, err, text, out)
	}
}

// eventually runs a script until it succeeds, and returns its output.
func (m *machine) eventually(t *testing.T, script string) (out string) {
	t.Helper()
	ctx := harness.Context(t, commandTimeout)
	err := lab.Eventually(ctx, 100*time.Millisecond, func() (err error) {
		out, err = m.run(ctx, script)
		return err
	})
	if err != nil {
		t.Fatalf("%s%v\n%s", script, err, out)
	}
	return out
}
