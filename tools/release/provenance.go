package main

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
)

const source = "https://github.com/vipgate/vipgate"

// writeProvenance writes an in-toto statement with SLSA's provenance of every other file. It has no
// times and no name of a machine: two builds of a commit write the same bytes.
func (r *release) writeProvenance() error {
	commit, err := exec.Command("git", "rev-parse", "HEAD").Output()
	if err != nil {
		return fmt.Errorf("failed to read the commit: %w", err)
	}
	entries, err := os.ReadDir(r.out)
	if err != nil {
		return err
	}
	type object = map[string]any
	var subjects []object
	for _, e := range entries {
		data, err := os.ReadFile(filepath.Join(r.out, e.Name()))
		if err != nil {
			return err
		}
		digest := sha256.Sum256(data)
		subjects = append(subjects, object{
			"name": e.Name(), "digest": map[string]string{"sha256": hex.EncodeToString(digest[:])},
		})
	}
	statement := object{
		"_type":         "https://in-toto.io/Statement/v1",
		"subject":       subjects,
		"predicateType": "https://slsa.dev/provenance/v1",
		"predicate": object{
			"buildDefinition": object{
				"buildType":          source + "/blob/main/CONTRIBUTING.md#releases",
				"externalParameters": object{"version": r.version},
				"internalParameters": object{"go": runtime.Version()},
				"resolvedDependencies": []object{{
					"uri": "git+" + source, "digest": object{"gitCommit": strings.TrimSpace(string(commit))},
				}},
			},
			"runDetails": object{"builder": object{"id": source + "/blob/main/tools/release"}},
		},
	}
	text, err := json.MarshalIndent(statement, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(r.out, fmt.Sprintf("vipgate-%s.intoto.json", r.version)), append(text, '\n'), 0o644)
}
