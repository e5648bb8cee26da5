package main

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/cmd/internal/frontendcmd"
	"github.com/vipgate/vipgate/test/harness"
)

func TestSpeakerPasswordIsCreatedOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "password")
	harness.Must(t, createPassword(path))
	password, err := os.ReadFile(path)
	harness.Must(t, err)
	info, err := os.Stat(path)
	harness.Must(t, err)
	if len(password) < 20 || info.Mode().Perm() != 0o600 {
		t.Errorf("%d bytes of mode %o", len(password), info.Mode().Perm())
	}
	harness.Must(t, createPassword(path))
	if again, err := os.ReadFile(path); err != nil || string(again) != string(password) {
		t.Errorf("the second call changed the file: %v", err)
	}
	// A link leads no write to another file.
	link := filepath.Join(t.TempDir(), "link")
	harness.Must(t, os.Symlink(filepath.Join(t.TempDir(), "other"), link))
	harness.Must(t, createPassword(link))
	if _, err := os.Stat(link); !os.IsNotExist(err) {
		t.Errorf("behind the link: %v", err)
	}
	empty := filepath.Join(t.TempDir(), "empty")
	harness.Must(t, os.WriteFile(empty, nil, 0o600))
	for file, valid := range map[string]bool{path: true, link: false, empty: false} {
		flags := frontendcmd.SpeakerFlags{SpeakerPasswordFile: file}
		if _, err := flags.Password(); (err == nil) != valid {
			t.Errorf("password of %s: %v", file, err)
		}
	}
}

// A refused command leaves no file.
func TestRefusedSpeakerHasNoPassword(t *testing.T) {
	dir := t.TempDir()
	file, password := filepath.Join(dir, "trench.yaml"), filepath.Join(dir, "password")
	harness.Must(t, os.WriteFile(file, trenchFile(t), 0o600))
	command, err := parser(t).Parse([]string{
		"speaker-config", "gobgp", "--trench-file=" + file, "--speaker-address=fd00::1", "--speaker-local=fd00::2",
		"--speaker-as=8103", "--speaker-password-file=" + password,
	})
	harness.Must(t, err)
	harness.WantError(t, command.Run(&cli.Output{}), "router ID")
	if _, err := os.Stat(password); !os.IsNotExist(err) {
		t.Errorf("the password file: %v", err)
	}
}

// The placeholder in the configuration needs no password.
func TestSpeakerConfigOfUnreadablePassword(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to become another user")
	}
	dir := t.TempDir()
	file, password := filepath.Join(dir, "trench.yaml"), filepath.Join(dir, "password")
	harness.Must(t, errors.Join(os.Chmod(filepath.Dir(dir), 0o755), os.WriteFile(file, trenchFile(t), 0o644),
		createPassword(password)))
	command, err := parser(t).Parse([]string{
		"speaker-config", "frr", "--trench-file=" + file, "--speaker-address=10.77.0.1", "--speaker-local=10.77.0.2",
		"--speaker-as=8103", "--speaker-password-file=" + password,
	})
	harness.Must(t, err)
	var out bytes.Buffer
	harness.Must(t, harness.As(1234, func() error { return command.Run(&cli.Output{Writer: &out}) }))
	harness.WantText(t, out.String(), " neighbor 10.77.0.2 password SECRET\n")
}
