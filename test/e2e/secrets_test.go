package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/test/lab"
)

// birdConf is the path of the configuration of the pod's BIRD.
func (f *fixture) birdConf() string {
	f.t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", f.birdPID()))
	f.must(err)
	args := strings.Split(string(b), "\x00")
	i := slices.Index(args, "-c")
	if i < 0 || i+1 == len(args) {
		f.t.Fatalf("BIRD runs without a configuration: %q", args)
	}
	return args[i+1]
}

// passwords matches the passwords in BIRD's configuration.
var passwords = regexp.MustCompile(`password "([^"]+)"`)

// No secret is in arguments, logs, debug output or metrics (docs/architecture.md#security).
func TestNoSecretInOutput(t *testing.T) {
	t.Parallel()
	const gatewayPassword = "a-password-of-the-gateway"
	f := newFixture(t)
	f.must(f.gateway.Process.Kill())
	f.gateway.Password = gatewayPassword
	f.must(f.gateway.Start())
	key := f.path("gateway.key")
	f.must(os.WriteFile(key, []byte(gatewayPassword+"\n"), 0o600))
	text := usualTrench()
	for _, g := range []string{lab.GatewayA4.String(), `"` + lab.GatewayA6.String() + `"`} {
		text = strings.Replace(text, "address: "+g, "address: "+g+", passwordFile: "+key, 1)
	}
	f.must(f.pod.WriteTrench(text))
	f.up(f.target1)
	f.must(f.pod.StartLB("--log-level=debug"))
	f.must(f.pod.StartFrontend("--log-level=debug"))
	f.wantRoutes(vipA4, vipA6)

	conf := f.birdConf()
	b, err := os.ReadFile(conf)
	f.must(err)
	if mode := modeOf(t, conf); mode != 0o600 {
		t.Errorf("%s has mode %#o, want 0600", conf, mode)
	}
	secrets := map[string]string{"the password of the gateway": gatewayPassword}
	for _, m := range passwords.FindAllStringSubmatch(string(b), -1) {
		if m[1] != gatewayPassword {
			secrets["the password of the loopback session"] = m[1]
		}
	}
	ca, err := os.ReadFile(filepath.Join(f.pod.Authority(), "ca.key"))
	f.must(err)
	secrets["the key of the authority"] = strings.Split(string(ca), "\n")[1]
	if len(secrets) != 3 || len(secrets["the password of the loopback session"]) < 16 {
		t.Fatalf("BIRD's configuration and the authority hold only %d secrets", len(secrets))
	}

	shown := map[string]string{
		"metrics of lb": f.get(lab.LBMetrics, "/metrics"), "metrics of frontend": f.get(lab.FrontendMetrics,
			"/metrics"),
	}
	admin := "--admin-socket=unix://" + f.pod.FrontendAdmin()
	show := func(program string, args ...string) {
		out, code := f.run(program, args...)
		name := program + " " + strings.Join(args, " ")
		// status exits with 1 while a condition is not met.
		if code > 1 || len(out) < 100 {
			t.Errorf("%s: exit status %d: %s", name, code, out)
		}
		shown[name] = out
	}
	show("frontend", "render", "--trench-file="+f.pod.TrenchFile(), "--external-interface="+lab.External,
		"--bird-dir="+f.pod.BirdDir(), "--bird-socket="+f.pod.BirdSocket())
	show("frontend", "status", "--output=json", admin)
	show("frontend", "events", "--output=json", admin)
	show("lb", "status", "--output=json", "--admin-socket=unix://"+f.pod.LBAdmin())
	for name, text := range shown {
		if strings.HasPrefix(name, "frontend render") && !strings.Contains(text, "protocol bgp") {
			t.Errorf("%s shows no configuration of BIRD", name)
		}
	}
	pids, err := f.Pod.Processes()
	f.must(err)
	if len(pids) < 3 {
		t.Errorf("the pod has only %d processes", len(pids))
	}
	for _, pid := range pids {
		for _, file := range []string{"cmdline", "environ"} {
			b, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, file))
			f.must(err)
			shown[fmt.Sprintf("%s of %d (%s)", file, pid, bytes.SplitN(b, []byte{0}, 2)[0])] = string(b)
		}
	}
	// All other written files, in particular logs.
	f.must(filepath.WalkDir(f.Dir, func(path string, e fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // it was removed during the walk
		}
		if err != nil {
			return err
		}
		if path == filepath.Dir(f.gateway.Socket()) || path == f.pod.Authority() {
			return fs.SkipDir // the gateway is not checked
		}
		if !e.Type().IsRegular() || path == conf || path == key {
			return nil
		}
		b, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		shown[path] = string(b)
		return err
	}))
	if log := shown[f.pod.Frontend.Log]; !strings.Contains(log, "level=DEBUG") {
		t.Error("the frontend's log is not at level debug")
	}
	for where, text := range shown {
		for what, secret := range secrets {
			if i := strings.Index(text, secret); i >= 0 {
				t.Errorf("%s is in %s: %q", what, where, text[max(0, i-80):i])
			}
		}
	}
}
