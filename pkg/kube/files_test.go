package kube

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/kube/cluster"
	"github.com/vipgate/vipgate/pkg/kube/translation"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/test/harness"
)

// The password of a Secret that is missing for a while stays until no gateway names it.
func TestKeyOfMissingSecret(t *testing.T) {
	dir := t.TempDir()
	f := &files{trench: filepath.Join(dir, "trench.yaml"), keyDir: filepath.Join(dir, "keys")}
	gateway := trench.Gateway{Name: "gw", PasswordFile: filepath.Join(f.keyDir, "gw_key")}
	named := &trench.Config{Attractor: trench.Attractor{Gateways: []trench.Gateway{{Name: "other"}, gateway}}}
	for i, step := range []struct {
		config *trench.Config
		keys   map[string][]byte
		want   string
		wrote  bool
	}{
		{named, map[string][]byte{"gw_key": []byte("first")}, "first", true},
		{named, nil, "first", false},
		{named, map[string][]byte{"gw_key": []byte("second")}, "second", true},
		{&trench.Config{}, nil, "", true},
		{named, nil, "", false},
		{named, map[string][]byte{"gw_key": []byte("third")}, "third", true},
		{nil, nil, "", true}, // a Gateway of Meridio 2
	} {
		wrote, err := f.write(translation.Result{File: []byte("file"), Config: step.config, Keys: step.keys})
		key, _ := os.ReadFile(gateway.PasswordFile)
		if string(key) != step.want || wrote != step.wrote || err != nil {
			t.Errorf("step %d: %q, wrote %v, %v", i+1, key, wrote, err)
		}
	}
}

// Until the first snapshot the stale file of an earlier process stays, with its time.
func TestStaleUntilFirstSnapshot(t *testing.T) {
	f := &files{trench: filepath.Join(t.TempDir(), "trench.yaml")}
	path := f.trench + trench.StaleSuffix
	harness.Must(t, os.WriteFile(path, []byte("2026-11-29T08:00:00Z away\n"), fileMode))
	failing := cluster.Failure{Since: time.Now(), Cause: "refused"}
	later := cluster.Failure{Since: time.Now().Add(time.Minute), Cause: "again"}
	for i, step := range []struct {
		state cluster.State
		want  string
	}{
		{cluster.State{}, "2026-11-29T08:00:00Z away\n"},
		{cluster.State{Stale: failing}, "2026-11-29T08:00:00Z refused\n"},
		{cluster.State{}, "2026-11-29T08:00:00Z refused\n"},
		{cluster.State{Stale: later}, "2026-11-29T08:00:00Z again\n"},
		{cluster.State{Synced: time.Now()}, ""},
	} {
		err := f.stale(step.state)
		if content, _ := os.ReadFile(path); string(content) != step.want || err != nil {
			t.Errorf("step %d: %q, %v", i+1, content, err)
		}
	}
}
