package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/goreleaser/nfpm/v2/files"
)

// writePages has the tests of the programs write their manuals and completions: they have the model of
// the flags, and write the tables of the documents in the same way.
func (r *release) writePages() error {
	for _, p := range programs {
		if !p.host {
			continue
		}
		test := exec.Command("go", "test", "-count=1", "./cmd/"+p.name, "-run=^TestConfigurationDocument$", "-pages="+r.pages)
		test.Stderr = os.Stderr
		if out, err := test.Output(); err != nil {
			return fmt.Errorf("failed to write the manual of %s: %w: %s", p.name, err, out)
		}
		if _, err := os.Stat(filepath.Join(r.pages, p.command()+".1")); err != nil {
			return fmt.Errorf("manual of %s: %w", p.name, err)
		}
	}
	return nil
}

// addPages adds the manuals and completions to a package, where shells and man look for them.
func (r *release) addPages(add func(source, destination, kind string, mode os.FileMode)) {
	for _, p := range programs {
		if !p.host {
			continue
		}
		name := p.command()
		for source, destination := range map[string]string{
			name + ".1":    "/usr/share/man/man1/" + name + ".1",
			name + ".bash": "/usr/share/bash-completion/completions/" + name,
			"_" + name:     "/usr/share/zsh/vendor-completions/_" + name,
			name + ".fish": "/usr/share/fish/vendor_completions.d/" + name + ".fish",
		} {
			add(filepath.Join(r.pages, source), destination, files.TypeFile, 0o644)
		}
	}
}
