package kube

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/vipgate/vipgate/pkg/kube/translation"
	"github.com/vipgate/vipgate/pkg/trench"
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
