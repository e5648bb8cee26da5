package main

import (
	"archive/tar"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// keyVariable names the environment variable with the signing key: an ECDSA key, PKCS#8 in PEM. cosign
// import-key-pair takes the same file, and cosign verify and verify-blob its public key.
const keyVariable = "RELEASE_SIGNING_KEY"

// signingKey returns nil if the environment has no key.
func signingKey() (*ecdsa.PrivateKey, error) {
	text := os.Getenv(keyVariable)
	if text == "" {
		return nil, nil
	}
	block, _ := pem.Decode([]byte(text))
	if block == nil {
		return nil, errors.New(keyVariable + " is not in PEM")
	}
	parsed, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	key, ok := parsed.(*ecdsa.PrivateKey)
	if err != nil || !ok {
		return nil, fmt.Errorf("%s is not an ECDSA key in PKCS#8: %w", keyVariable, err)
	}
	return key, nil
}

// needKey fails without a signing key.
func needKey() error {
	key, err := signingKey()
	if err == nil && key == nil {
		err = errors.New("no key: set " + keyVariable)
	}
	return err
}

// signature returns a signature as cosign writes it.
func signature(key *ecdsa.PrivateKey, data []byte) (string, error) {
	digest := sha256.Sum256(data)
	signed, err := ecdsa.SignASN1(rand.Reader, key, digest[:])
	return base64.StdEncoding.EncodeToString(signed), err
}

// signChecksums writes SHA256SUMS.sig, if there is a key: the only file that differs between two runs.
func (r *release) signChecksums() error {
	key, err := signingKey()
	if err != nil || key == nil {
		return err
	}
	sums, err := os.ReadFile(filepath.Join(r.out, checksums))
	if err != nil {
		return err
	}
	signed, err := signature(key, sums)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(r.out, checksums+".sig"), []byte(signed), 0o644)
}

// publish pushes the OCI archives of a release: images as REGISTRY/NAME, charts as REGISTRY/charts/NAME,
// each with its signature if there is a key. Credentials are those of docker login.
func (r *release) publish(registry string) error {
	key, err := signingKey()
	if err != nil {
		return err
	}
	archives, err := filepath.Glob(filepath.Join(r.out, "*.oci.tar"))
	if err != nil || len(archives) == 0 {
		return fmt.Errorf("%s has no *.oci.tar: %w", r.out, err)
	}
	for _, archive := range archives {
		artifact, version, _ := strings.Cut(strings.TrimSuffix(filepath.Base(archive), ".oci.tar"), "_")
		if chart, ok := strings.CutPrefix(artifact, "chart-"); ok {
			artifact = "charts/" + chart
		}
		reference, err := name.NewTag(registry + "/" + artifact + ":" + version)
		if err == nil {
			err = push(archive, reference, key)
		}
		if err != nil {
			return fmt.Errorf("failed to publish %s: %w", archive, err)
		}
	}
	return nil
}

// push pushes the only entry of an OCI archive, and its signature.
func push(archive string, reference name.Tag, key *ecdsa.PrivateKey) error {
	dir, err := os.MkdirTemp("", "release-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if err := extract(archive, dir); err != nil {
		return err
	}
	index, err := layout.ImageIndexFromPath(dir)
	if err != nil {
		return err
	}
	manifest, err := index.IndexManifest()
	if err != nil {
		return err
	}
	if len(manifest.Manifests) != 1 {
		return fmt.Errorf("it has %d entries, not one", len(manifest.Manifests))
	}
	entry := manifest.Manifests[0]
	login := remote.WithAuthFromKeychain(authn.DefaultKeychain)
	if entry.MediaType == types.OCIImageIndex {
		var nested v1.ImageIndex
		if nested, err = index.ImageIndex(entry.Digest); err == nil {
			err = remote.WriteIndex(reference, nested, login)
		}
	} else {
		var image v1.Image
		if image, err = index.Image(entry.Digest); err == nil {
			err = remote.Write(reference, image, login)
		}
	}
	if err != nil || key == nil {
		return err
	}
	signed, err := signatureImage(key, reference.Repository.Name(), entry.Digest)
	if err != nil {
		return err
	}
	tag := strings.Replace(entry.Digest.String(), ":", "-", 1) + ".sig"
	return remote.Write(reference.Repository.Tag(tag), signed, login)
}

// signatureImage returns the image in which cosign looks for the signature of a manifest.
func signatureImage(key *ecdsa.PrivateKey, repository string, digest v1.Hash) (v1.Image, error) {
	payload, err := json.Marshal(map[string]any{
		"critical": map[string]any{
			"identity": map[string]string{"docker-reference": repository},
			"image":    map[string]string{"docker-manifest-digest": digest.String()},
			"type":     "cosign container image signature",
		},
		"optional": nil,
	})
	if err != nil {
		return nil, err
	}
	signed, err := signature(key, payload)
	if err != nil {
		return nil, err
	}
	layer, _, err := v1.SHA256(strings.NewReader(string(payload)))
	if err != nil {
		return nil, err
	}
	config, err := json.Marshal(v1.ConfigFile{RootFS: v1.RootFS{Type: "layers", DiffIDs: []v1.Hash{layer}}})
	if err != nil {
		return nil, err
	}
	return newArtifact(types.OCIConfigJSON, config, "application/vnd.dev.cosign.simplesigning.v1+json", payload,
		map[string]string{"dev.cosignproject.cosign/signature": signed})
}

// extract unpacks the files of an OCI archive.
func extract(archive, dir string) error {
	file, err := os.Open(archive)
	if err != nil {
		return err
	}
	defer file.Close()
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	for r := tar.NewReader(file); ; {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if header.Typeflag == tar.TypeDir {
			if err := root.MkdirAll(strings.TrimSuffix(header.Name, "/"), 0o755); err != nil {
				return err
			}
			continue
		}
		out, err := root.Create(header.Name)
		if err != nil {
			return err
		}
		_, err = io.Copy(out, r)
		if err = errors.Join(err, out.Close()); err != nil {
			return err
		}
	}
}
