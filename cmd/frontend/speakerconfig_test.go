package main

import (
	"os"
	"path/filepath"
	"testing"

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
