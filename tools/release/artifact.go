package main

import (
	"bytes"
	"encoding/json"
	"fmt"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// artifact is an OCI manifest of one layer whose config is not that of a container.
type artifact struct {
	manifest, config []byte
	layer            v1.Layer
}

// newArtifact returns the artifact as an image, as registries keep it.
func newArtifact(configType types.MediaType, config []byte, layerType types.MediaType, content []byte,
	annotations map[string]string,
) (v1.Image, error) {
	a := artifact{config: config, layer: static.NewLayer(content, layerType)}
	manifest := v1.Manifest{SchemaVersion: 2, MediaType: types.OCIManifestSchema1}
	for _, blob := range []struct {
		descriptor *v1.Descriptor
		data       []byte
		mediaType  types.MediaType
	}{{&manifest.Config, config, configType}, {&v1.Descriptor{}, content, layerType}} {
		digest, size, err := v1.SHA256(bytes.NewReader(blob.data))
		if err != nil {
			return nil, err
		}
		*blob.descriptor = v1.Descriptor{MediaType: blob.mediaType, Size: size, Digest: digest}
		if blob.descriptor != &manifest.Config {
			blob.descriptor.Annotations = annotations
			manifest.Layers = append(manifest.Layers, *blob.descriptor)
		}
	}
	var err error
	if a.manifest, err = json.Marshal(manifest); err != nil {
		return nil, err
	}
	return partial.CompressedToImage(a)
}

func (a artifact) MediaType() (types.MediaType, error) { return types.OCIManifestSchema1, nil }
func (a artifact) RawManifest() ([]byte, error)        { return a.manifest, nil }
func (a artifact) RawConfigFile() ([]byte, error)      { return a.config, nil }

func (a artifact) LayerByDigest(digest v1.Hash) (partial.CompressedLayer, error) {
	known, err := a.layer.Digest()
	if err != nil {
		return nil, err
	}
	if digest != known {
		return partial.CompressedLayer(nil), fmt.Errorf("the artifact has no layer %s", digest)
	}
	return a.layer, nil
}
