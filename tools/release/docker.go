package main

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"path"
	"path/filepath"
	"runtime"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// writeDockerArchives writes a docker archive of each image, as docker save does.
func (r *release) writeDockerArchives() error {
	for _, p := range programs {
		if !p.image {
			continue
		}
		imageName := p.name
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

// birdFile is the BIRD that frontend starts.
const birdFile = "/usr/sbin/bird"

// requireBIRD fails if a base image of the frontend lacks BIRD.
func requireBIRD(image v1.Image) error {
	files := mutate.Extract(image)
	defer files.Close()
	for r := tar.NewReader(files); ; {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			return errors.New("the base image lacks " + birdFile)
		}
		if err != nil {
			return fmt.Errorf("failed to read the files of the base image: %w", err)
		}
		if path.Join("/", header.Name) == birdFile {
			return nil
		}
	}
}
