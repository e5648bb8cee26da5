package main

import (
	"bytes"
	"crypto/x509"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/bundle/x509bundle"
	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/svid/x509svid"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/test/harness"
)

const operator = "spiffe://vipgate.local/operator"

// svid runs `lb svid` with arguments.
func svid(t *testing.T, args ...string) (string, error) {
	t.Helper()
	for _, name := range []string{"VIPGATE_IDENTITY", "VIPGATE_DEV_AUTHORITY_DIR"} {
		t.Setenv(name, "") // restores the variable after the test
		harness.Must(t, os.Unsetenv(name))
	}
	parsed, err := parser(t).Parse(append([]string{"svid"}, args...))
	if err != nil {
		return "", err
	}
	var out bytes.Buffer
	return out.String(), parsed.Run(&cli.Output{Writer: &out})
}

func TestSVIDIsSignedByTheAuthority(t *testing.T) {
	dir, out := filepath.Join(t.TempDir(), "authority"), filepath.Join(t.TempDir(), "operator")
	if _, err := identity.OpenDevAuthority(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	for range 2 { // a second one replaces the first
		if _, err := svid(t, "--identity=dev", "--dev-authority-dir="+dir, "--id="+operator, "--svid-dir="+out,
			"--dev-ttl=1h"); err != nil {
			t.Fatal(err)
		}
	}
	for name, mode := range map[string]fs.FileMode{"tls.key": 0o600, "tls.crt": 0o644, "ca.crt": 0o644} {
		if info, err := os.Stat(filepath.Join(out, name)); err != nil || info.Mode().Perm() != mode {
			t.Errorf("%s: %v, %v; want mode %o", name, info.Mode(), err, mode)
		}
	}
	if info, err := os.Stat(out); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("directory: %v, %v", info.Mode(), err)
	}
	own, err := x509svid.Load(filepath.Join(out, "tls.crt"), filepath.Join(out, "tls.key"))
	harness.Must(t, err)
	bundle, err := x509bundle.Load(spiffeid.RequireTrustDomainFromString("vipgate.local"), filepath.Join(out, "ca.crt"))
	harness.Must(t, err)
	id, _, err := x509svid.Verify(own.Certificates, bundle)
	if err != nil || id.String() != operator {
		t.Errorf("%v, %v", id, err)
	}
	leaf := own.Certificates[0]
	if left := time.Until(leaf.NotAfter); left < 55*time.Minute || left > 65*time.Minute {
		t.Errorf("it lives for %v", left)
	}
	if leaf.IsCA || leaf.KeyUsage&x509.KeyUsageCertSign != 0 {
		t.Error("it can sign others")
	}
}

func TestSVIDIsRefused(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "authority")
	if _, err := identity.OpenDevAuthority(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	open := filepath.Join(t.TempDir(), "open")
	harness.Must(t, os.Mkdir(open, 0o700))
	harness.Must(t, os.Chmod(open, 0o777))
	nothing := filepath.Join(t.TempDir(), "nothing")
	for _, tt := range []struct {
		name string
		args []string
		want string
	}{
		{"no authority named", []string{"--id=" + operator}, "add --identity=dev"},
		{"SPIRE's business", []string{"--identity=spiffe", "--id=" + operator}, "spire-server x509 mint"},
		{
			"files",
			[]string{"--identity=files", "--dev-authority-dir=" + dir, "--id=" + operator},
			"only the development authority",
		},
		{"no directory", []string{"--identity=dev", "--id=" + operator}, "--dev-authority-dir is missing"},
		{
			"no authority there",
			[]string{"--identity=dev", "--dev-authority-dir=" + nothing, "--id=" + operator},
			"no development authority in " + nothing,
		},
		{
			"others can write",
			[]string{"--identity=dev", "--dev-authority-dir=" + open, "--id=" + operator},
			"accessible to other users",
		},
		{"no ID", []string{"--identity=dev", "--dev-authority-dir=" + dir}, "--id"},
		{
			"a trust domain only",
			[]string{"--identity=dev", "--dev-authority-dir=" + dir, "--id=spiffe://vipgate.local"},
			"needs a path",
		},
		{"no SPIFFE ID", []string{"--identity=dev", "--dev-authority-dir=" + dir, "--id=operator"}, "not a SPIFFE ID"},
		{
			"for ever",
			[]string{"--identity=dev", "--dev-authority-dir=" + dir, "--id=" + operator, "--dev-ttl=100000h"},
			"--dev-ttl=100000h",
		},
		{
			"no life at all",
			[]string{"--identity=dev", "--dev-authority-dir=" + dir, "--id=" + operator, "--dev-ttl=0s"},
			"--dev-ttl=0s",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			out := filepath.Join(t.TempDir(), "out")
			_, err := svid(t, append(tt.args, "--svid-dir="+out)...)
			harness.WantError(t, err, tt.want)
			if _, err := os.Stat(out); err == nil {
				t.Error("something was written")
			}
		})
	}
	if _, err := os.Stat(nothing); err == nil {
		t.Error("an authority was created that no peer trusts")
	}
}
