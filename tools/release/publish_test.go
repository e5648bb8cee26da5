package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/remote"
)

// signer sets a new key in the environment.
func signer(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv(keyVariable, string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})))
	return key
}

func verify(t *testing.T, key *ecdsa.PrivateKey, data []byte, signature string) {
	t.Helper()
	signed, err := base64.StdEncoding.DecodeString(signature)
	digest := sha256.Sum256(data)
	if err != nil || !ecdsa.VerifyASN1(&key.PublicKey, digest[:], signed) {
		t.Errorf("the signature %q does not fit: %v", signature, err)
	}
}

// The charts and an image with two platforms reach a registry, each with a signature as cosign
// verifies it: the payload names the manifest, and the annotation of the layer has its signature.
func TestPublishSigned(t *testing.T) {
	t.Chdir("../..")
	key := signer(t)
	r := &release{version: "v0.1.0", time: time.Unix(0, 0), out: t.TempDir()}
	if err := r.writeCharts(); err != nil {
		t.Fatal(err)
	}
	index, err := random.Index(64, 1, 2)
	if err != nil {
		t.Fatal(err)
	}
	archive := mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: index})
	if err := r.writeArchive(archive, filepath.Join(r.out, "lb_v0.1.0.oci.tar")); err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	defer server.Close()
	host := strings.TrimPrefix(server.URL, "http://")
	if err := r.publish(host + "/vipgate"); err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{"lb:v0.1.0", "charts/vipgate:0.1.0", "charts/vipgate-crds:0.1.0"} {
		tag, err := name.NewTag(host + "/vipgate/" + text)
		if err != nil {
			t.Fatal(err)
		}
		pushed, err := remote.Head(tag)
		if err != nil {
			t.Fatal(err)
		}
		signed, err := remote.Image(tag.Repository.Tag(strings.Replace(pushed.Digest.String(), ":", "-", 1) + ".sig"))
		if err != nil {
			t.Fatal(err)
		}
		manifest, err := signed.Manifest()
		if err != nil {
			t.Fatal(err)
		}
		payload := content(t, signed)
		verify(t, key, payload, manifest.Layers[0].Annotations["dev.cosignproject.cosign/signature"])
		if !strings.Contains(string(payload), `"docker-manifest-digest":"`+pushed.Digest.String()+`"`) {
			t.Errorf("%s: the payload %s names another manifest than %s", text, payload, pushed.Digest)
		}
	}
	tag, err := name.NewTag(host + "/vipgate/charts/vipgate:0.1.0")
	if err != nil {
		t.Fatal(err)
	}
	chart, err := remote.Image(tag)
	if err != nil {
		t.Fatal(err)
	}
	packed, err := os.ReadFile(filepath.Join(r.out, "vipgate-0.1.0.tgz"))
	if err != nil || !slices.Equal(content(t, chart), packed) {
		t.Errorf("the chart in the registry differs from the file: %v", err)
	}
	pullChart(t, host)
}

// pullChart has Helm itself take a chart out of the registry, where make test-kube has built it.
func pullChart(t *testing.T, host string) {
	t.Helper()
	if _, err := os.Stat("bin/tools/helm"); err != nil {
		t.Log("not tested with Helm: make bin/tools/helm")
		return
	}
	helm := exec.CommandContext(t.Context(), "bin/tools/helm", "pull", "oci://"+host+"/vipgate/charts/vipgate",
		"--version=0.1.0", "--plain-http", "--untar", "--destination="+t.TempDir())
	if out, err := helm.CombinedOutput(); err != nil {
		t.Errorf("helm pull: %v\n%s", err, out)
	}
}

// content returns the layer of an artifact.
func content(t *testing.T, image v1.Image) []byte {
	t.Helper()
	layers, err := image.Layers()
	if err != nil || len(layers) != 1 {
		t.Fatalf("%d layers, %v", len(layers), err)
	}
	reader, err := layers[0].Compressed()
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	data, err := io.ReadAll(reader)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// The provenance has every file with its digest, the checksums have the provenance, too, and their
// signature fits.
func TestProvenanceAndChecksums(t *testing.T) {
	key := signer(t)
	r := &release{version: "v0.1.0", out: t.TempDir()}
	if err := os.WriteFile(filepath.Join(r.out, "lb"), []byte("program"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, step := range []func() error{r.writeProvenance, r.writeChecksums, needKey, r.signChecksums} {
		if err := step(); err != nil {
			t.Fatal(err)
		}
	}
	read := func(file string) []byte {
		data, err := os.ReadFile(filepath.Join(r.out, file))
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	var statement struct {
		Subject []struct {
			Name   string
			Digest map[string]string
		}
		PredicateType string
	}
	if err := json.Unmarshal(read("vipgate-v0.1.0.intoto.json"), &statement); err != nil {
		t.Fatal(err)
	}
	if s := statement.Subject; len(s) != 1 || s[0].Name != "lb" || len(s[0].Digest["sha256"]) != 64 ||
		statement.PredicateType != "https://slsa.dev/provenance/v1" {
		t.Errorf("statement %+v", statement)
	}
	sums := read(checksums)
	for _, want := range []string{statement.Subject[0].Digest["sha256"] + "  lb\n", "  vipgate-v0.1.0.intoto.json\n"} {
		if !strings.Contains(string(sums), want) {
			t.Errorf("the checksums lack %q:\n%s", want, sums)
		}
	}
	verify(t, key, sums, string(read(checksums+".sig")))
}

func TestSignNeedsKey(t *testing.T) {
	t.Setenv(keyVariable, "")
	if err := needKey(); err == nil || !strings.Contains(err.Error(), keyVariable) {
		t.Errorf("without a key: %v", err)
	}
}

func TestCheckComesFirst(t *testing.T) {
	t.Chdir("../..")
	for version, want := range map[string]string{
		"v9.9.9": `no section "v9.9.9"`, "0123456789ab": "",
	} {
		err := (&release{version: version}).check()
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", version, err, want)
		}
	}
	err := (&release{version: "v9.9.9"}).checkCharts()
	if err == nil || !strings.Contains(err.Error(), "edit and commit it") {
		t.Errorf("charts of another version: %v", err)
	}
}
