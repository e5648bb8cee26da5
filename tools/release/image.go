package main

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// writeImages writes an OCI archive of each image for both architectures.
func (r *release) writeImages() error {
	for _, p := range programs {
		if !p.image {
			continue
		}
		name := p.name
		spec, err := readDockerfile(filepath.Join("deployments/images", name+".Dockerfile"))
		if err != nil {
			return err
		}
		index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
		for _, arch := range r.architectures {
			image, err := r.image(name, arch, spec)
			if err != nil {
				return fmt.Errorf("failed to build the image of %s for %s: %w", name, arch, err)
			}
			index = mutate.AppendManifests(index, mutate.IndexAddendum{Add: image, Descriptor: v1.Descriptor{
				Platform: &v1.Platform{OS: "linux", Architecture: arch},
			}})
		}
		// Readers of OCI archives want one entry: the index of both architectures, with its tag.
		tagged := mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: index, Descriptor: v1.Descriptor{
			Annotations: refName(r.version),
		}})
		archive := filepath.Join(r.out, fmt.Sprintf("%s_%s.oci.tar", name, r.version))
		if err := r.writeArchive(tagged, archive); err != nil {
			return fmt.Errorf("failed to write %s: %w", archive, err)
		}
	}
	return nil
}

// image has the programs on nothing at all, or on the image that its parameter names; without
// one, BIRD is below those that run it.
func (r *release) image(name, arch string, spec *imageSpec) (v1.Image, error) {
	config := spec.config
	config.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	image := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	var layers []func(*tar.Writer) error
	if base := r.bases[name]; base != "" {
		var err error
		if image, err = tarball.ImageFromPath(base, nil); err != nil {
			return nil, fmt.Errorf("failed to read the base image %s: %w", base, err)
		}
		if spec.bird {
			if err := requireBIRD(image); err != nil {
				return nil, err
			}
		}
	} else if spec.bird {
		layers = append(layers, func(w *tar.Writer) error {
			return addTree(w, filepath.Join(r.base, arch, "root"), "", r.time)
		})
	}
	layers = append(layers, func(w *tar.Writer) error { return r.addPrograms(w, arch, spec) })
	known, err := image.ConfigFile()
	if err != nil {
		return nil, err
	}
	if known.Architecture != "" && known.Architecture != arch {
		return nil, fmt.Errorf("the base image is for %s", known.Architecture)
	}
	known = known.DeepCopy()
	known.OS, known.Architecture, known.Created, known.Config = "linux", arch, v1.Time{Time: r.time}, config
	if image, err = mutate.ConfigFile(image, known); err != nil {
		return nil, err
	}
	for _, write := range layers {
		layer, err := layerOf(write)
		if err != nil {
			return nil, err
		}
		image, err = mutate.Append(image, mutate.Addendum{
			Layer: layer, History: v1.History{Created: v1.Time{Time: r.time}, CreatedBy: "make release"},
		})
		if err != nil {
			return nil, err
		}
	}
	return image, nil
}

// addPrograms adds the programs and links of an image in lexical order.
func (r *release) addPrograms(w *tar.Writer, arch string, spec *imageSpec) error {
	for _, file := range slices.Sorted(maps.Keys(spec.binaries)) {
		data, err := os.ReadFile(r.binary(spec.binaries[file], arch))
		if err != nil {
			return err
		}
		header := &tar.Header{Name: file[1:], Mode: 0o755, Size: int64(len(data)), ModTime: r.time}
		if err := add(w, header, spec.capabilities[file], bytes.NewReader(data)); err != nil {
			return err
		}
	}
	for _, file := range slices.Sorted(maps.Keys(spec.links)) {
		header := &tar.Header{
			Typeflag: tar.TypeSymlink, Name: file[1:], Linkname: spec.links[file], Mode: 0o777, ModTime: r.time,
		}
		if err := add(w, header, nil, nil); err != nil {
			return err
		}
	}
	return nil
}

func layerOf(write func(*tar.Writer) error) (v1.Layer, error) {
	var data bytes.Buffer
	w := tar.NewWriter(&data)
	if err := write(w); err != nil {
		return nil, err
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(data.Bytes())), nil
	}, tarball.WithMediaType(types.OCILayer))
}

// refName returns the annotation by which an OCI archive names its image.
func refName(version string) map[string]string {
	return map[string]string{"org.opencontainers.image.ref.name": version}
}

// addTree adds the files of a directory in lexical order, owned by root, below a prefix.
func addTree(w *tar.Writer, root, prefix string, at time.Time) error {
	return filepath.WalkDir(root, func(file string, d fs.DirEntry, err error) error {
		if err != nil || file == root {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		link := ""
		if info.Mode()&fs.ModeSymlink != 0 {
			if link, err = os.Readlink(file); err != nil {
				return err
			}
		}
		header, err := tar.FileInfoHeader(info, link)
		if err != nil {
			return err
		}
		relative, err := filepath.Rel(root, file)
		if err != nil {
			return err
		}
		slash := ""
		if d.IsDir() {
			slash = "/"
		}
		*header = tar.Header{
			Typeflag: header.Typeflag, Name: prefix + relative + slash, Linkname: link, Mode: header.Mode,
			Size: header.Size, ModTime: at,
		}
		if !info.Mode().IsRegular() {
			return add(w, header, nil, nil)
		}
		content, err := os.Open(file)
		if err != nil {
			return err
		}
		defer content.Close()
		return add(w, header, nil, content)
	})
}

func add(w *tar.Writer, header *tar.Header, capability []byte, content io.Reader) error {
	if capability != nil {
		header.PAXRecords = map[string]string{"SCHILY.xattr.security.capability": string(capability)}
	}
	if err := w.WriteHeader(header); err != nil {
		return err
	}
	if content == nil {
		return nil
	}
	_, err := io.Copy(w, content)
	return err
}

// writeArchive writes an index and its images as an OCI layout in a tar file.
func (r *release) writeArchive(index v1.ImageIndex, archive string) error {
	dir, err := os.MkdirTemp("", "release-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if _, err := layout.Write(dir, index); err != nil {
		return err
	}
	file, err := os.Create(archive)
	if err != nil {
		return err
	}
	defer file.Close()
	w := tar.NewWriter(file)
	if err := addTree(w, dir, "", r.time); err != nil {
		return err
	}
	if err := w.Close(); err != nil {
		return err
	}
	return file.Close()
}
