package identity_test

import (
	"crypto/ecdsa"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/identitytest"
)

func filesSource(t *testing.T, dir string, o identity.Options) *identity.Source {
	t.Helper()
	src, err := identity.NewFiles(dir, o)
	must(t, err)
	identity.SetPoll(src, 10*time.Millisecond)
	identitytest.Run(t, src)
	return src
}

var must = harness.Must

func TestFilesFollowSymlinkSwap(t *testing.T) {
	ca := identitytest.NewCA(t, "example.org")
	dir := t.TempDir()
	swap := func(generation int) string {
		t.Helper()
		svid := ca.SVID(ca.ID("/lb"), time.Hour)
		data := fmt.Sprintf("..generation-%d", generation)
		ca.WriteFiles(filepath.Join(dir, data), svid)
		must(t, os.Symlink(data, filepath.Join(dir, "..data_tmp")))
		must(t, os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")))
		if generation > 0 {
			must(t, os.RemoveAll(filepath.Join(dir, fmt.Sprintf("..generation-%d", generation-1))))
		}
		return serialOf(svid)
	}
	want := swap(0)
	for _, name := range []string{identity.CertFile, identity.KeyFile, identity.BundleFile} {
		must(t, os.Symlink(filepath.Join("..data", name), filepath.Join(dir, name)))
	}
	src := filesSource(t, dir, identity.Options{})
	for generation := 1; generation <= 5; generation++ {
		identitytest.WaitStatus(t, src, "rotated", func(s identity.Status) bool { return s.Serial == want && s.Err == nil })
		want = swap(generation)
	}
}

// A reader that resolves each symlink separately would open one file before the swap and the rest
// after it.
func TestFilesOfOneGeneration(t *testing.T) {
	old, ca := identitytest.NewCA(t, "example.org"), identitytest.NewCA(t, "example.org")
	dir := t.TempDir()
	svid := ca.SVID(ca.ID("/lb"), time.Hour)
	old.WriteFiles(filepath.Join(dir, "..generation-0"), old.SVID(ca.ID("/lb"), time.Hour))
	ca.WriteFiles(filepath.Join(dir, "..generation-1"), svid)
	for name, target := range map[string]string{
		"..data":            "..generation-1",
		identity.CertFile:   "..data/tls.crt",
		identity.KeyFile:    "..data/tls.key",
		identity.BundleFile: "..generation-0/ca.crt",
	} {
		must(t, os.Symlink(target, filepath.Join(dir, name)))
	}
	src := filesSource(t, dir, identity.Options{})
	if st := identitytest.WaitStatus(t, src, "usable", usable); st.Serial != serialOf(svid) {
		t.Fatalf("got %+v", st)
	}
}

func TestMissingOrBrokenFiles(t *testing.T) {
	ca := identitytest.NewCA(t, "example.org")
	other := identitytest.NewCA(t, "example.org")
	dir := filepath.Join(t.TempDir(), "late")
	src := filesSource(t, dir, identity.Options{ID: ca.ID("/lb")})
	identitytest.WaitStatus(t, src, "missing", errSays(dir, "tls.crt", "no such file"))
	must(t, os.Mkdir(dir, 0o700))
	ca.WriteFiles(dir, ca.SVID(ca.ID("/other"), time.Hour))
	identitytest.WaitStatus(t, src, "of another ID", errSays("does not offer spiffe://example.org/lb",
		"only spiffe://example.org/other"))
	good := ca.SVID(ca.ID("/lb"), time.Hour)
	ca.WriteFiles(dir, good)
	identitytest.WaitStatus(t, src, "usable", usable)

	read := func(name string) []byte {
		t.Helper()
		b, err := os.ReadFile(filepath.Join(dir, name))
		must(t, err)
		return b
	}
	for _, c := range []struct {
		name, file string
		data       []byte
		says       []string
	}{
		{
			"half a certificate", identity.CertFile, read(identity.CertFile)[:100],
			[]string{"tls.crt", "PEM data in certificate"},
		},
		{
			"a bad certificate", identity.CertFile, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte("x")}),
			[]string{"tls.crt"},
		},
		{"no key", identity.KeyFile, read(identity.CertFile), []string{"tls.key", "PEM for the private key"}},
		{"another key", identity.KeyFile, keyOf(t, ca), []string{"tls.key", "does not match"}},
		{"another authority", identity.BundleFile, bundleOf(t, other), []string{"tls.crt", "not signed", "ca.crt"}},
		{"an empty bundle", identity.BundleFile, nil, []string{"ca.crt", "no PEM certificate"}},
	} {
		before := read(c.file)
		must(t, os.WriteFile(filepath.Join(dir, c.file), c.data, 0o600))
		st := identitytest.WaitStatus(t, src, c.name, renewalSays(c.says...))
		if st.Err != nil || st.Serial != serialOf(good) {
			t.Fatalf("%s: the last good SVID was dropped: %+v", c.name, st)
		}
		must(t, os.WriteFile(filepath.Join(dir, c.file), before, 0o600))
		identitytest.WaitStatus(t, src, "repaired", func(s identity.Status) bool { return s.RenewalErr == nil })
	}
	if st := src.Status().Load(); st.Rotations != 0 {
		t.Fatalf("%d rotations to the same SVID", st.Rotations)
	}
	// Opening a FIFO blocks until it has a writer.
	must(t, os.Remove(filepath.Join(dir, identity.CertFile)))
	must(t, syscall.Mkfifo(filepath.Join(dir, identity.CertFile), 0o600))
	identitytest.WaitStatus(t, src, "a FIFO", renewalSays("tls.crt", "not a regular file"))
}

func keyOf(t *testing.T, ca *identitytest.CA) []byte {
	dir := t.TempDir()
	ca.WriteFiles(dir, ca.SVID(ca.ID("/lb"), time.Hour))
	b, err := os.ReadFile(filepath.Join(dir, identity.KeyFile))
	must(t, err)
	return b
}

func bundleOf(t *testing.T, ca *identitytest.CA) []byte {
	b, err := ca.Bundle().Marshal()
	must(t, err)
	return b
}

func TestKeyFormats(t *testing.T) {
	ca := identitytest.NewCA(t, "example.org")
	dir := t.TempDir()
	svid := ca.SVID(ca.ID("/lb"), time.Hour)
	ca.WriteFiles(dir, svid)
	der, err := x509.MarshalECPrivateKey(svid.PrivateKey.(*ecdsa.PrivateKey))
	must(t, err)
	params := pem.EncodeToMemory(&pem.Block{Type: "EC PARAMETERS", Bytes: []byte{6, 0}}) // as openssl writes
	must(t, os.WriteFile(filepath.Join(dir, identity.KeyFile),
		append(params, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der})...), 0o600))
	src := filesSource(t, dir, identity.Options{})
	identitytest.WaitStatus(t, src, "usable", usable)
}

func TestFilesNeedDirectory(t *testing.T) {
	if _, err := identity.NewFiles("", identity.Options{}); err == nil {
		t.Fatal("no error")
	}
}
