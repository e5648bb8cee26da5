package main

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"maps"
	"path"
	"path/filepath"
	"runtime"
	"slices"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// writeDockerArchives writes a docker archive of each image, as docker save does.
func (r *release) writeDockerArchives() error {
	for _, imageName := range images {
		spec, err := readDockerfile(filepath.Join("deployments/images", imageName+".Dockerfile"))
		if err != nil {
			return err
		}
		image, err := r.image(imageName, runtime.GOARCH, spec)
		if err != nil {
			return fmt.Errorf("failed to build the image of %s: %w", imageName, err)
		}
		tag, err := name.NewTag("vipgate/" + imageName + ":" + r.version)
		if err != nil {
			return err
		}
		archive := filepath.Join(r.out, imageName+".tar")
		if err := tarball.WriteToFile(archive, tag, image); err != nil {
			return fmt.Errorf("failed to write %s: %w", archive, err)
		}
	}
	return nil
}

// grant copies the files of an image that need capabilities, other than own programs, and
// gives them theirs.
func grant(w *tar.Writer, image v1.Image, capabilities map[string][]byte, own map[string]string) error {
	wanted := map[string][]byte{}
	for file, capability := range capabilities {
		if own[file] == "" {
			wanted[file] = capability
		}
	}
	files := mutate.Extract(image)
	defer files.Close()
	r := tar.NewReader(files)
	for len(wanted) > 0 {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			return fmt.Errorf("the base image lacks a file that needs capabilities: %v", slices.Sorted(maps.Keys(wanted)))
		}
		if err != nil {
			return fmt.Errorf("failed to read the files of the base image: %w", err)
		}
		file := path.Join("/", header.Name)
		if capability, ok := wanted[file]; ok && header.Typeflag == tar.TypeReg {
			delete(wanted, file)
			if err := add(w, header, capability, r); err != nil {
				return err
			}
		}
	}
	return nil
}
