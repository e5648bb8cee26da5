package main

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// krewManifest has placeholders for the version and for the checksum of each archive.
const krewManifest = "deployments/krew/vipgate.yaml"

// writeKrew writes an archive of the kubectl plugin for each architecture, and its manifest.
func (r *release) writeKrew() error {
	text, err := os.ReadFile(krewManifest)
	if err != nil {
		return err
	}
	filled := []string{"VERSION", r.version}
	for _, arch := range r.architectures {
		archive, err := compressedTar(func(w *tar.Writer) error {
			for _, file := range [][2]string{{"LICENSE", "LICENSE"}, {"kubectl-vipgate", r.binary("vipgate", arch)}} {
				content, err := os.ReadFile(file[1])
				if err != nil {
					return err
				}
				header := &tar.Header{Name: file[0], Mode: 0o755, Size: int64(len(content)), ModTime: r.time, Typeflag: tar.TypeReg}
				if err := add(w, header, nil, bytes.NewReader(content)); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("failed to pack the kubectl plugin: %w", err)
		}
		name := "kubectl-vipgate_linux_" + arch + ".tar.gz"
		if err := os.WriteFile(filepath.Join(r.out, name), archive, 0o644); err != nil {
			return err
		}
		filled = append(filled, "SHA256_LINUX_"+strings.ToUpper(arch), fmt.Sprintf("%x", sha256.Sum256(archive)))
	}
	manifest := strings.NewReplacer(filled...).Replace(string(text))
	return os.WriteFile(filepath.Join(r.out, "kubectl-vipgate.yaml"), []byte(manifest), 0o644)
}
