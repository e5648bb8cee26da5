package identity_test

import (
	"crypto/tls"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"

	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/identitytest"
)

var devID = spiffeid.RequireFromString("spiffe://dev.local/lb")

func TestDevSourcesTrustEachOther(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "dev")
	fe := spiffeid.RequireFromString("spiffe://dev.local/frontend")
	journal, log := newJournal()
	a, err := identity.NewDev(dir, devID, identity.Options{Log: log})
	must(t, err)
	journal.wait(t, map[string]any{"level": "WARN", "dir": dir})
	b, err := identity.NewDev(dir, fe, identity.Options{})
	must(t, err)
	for _, s := range []*identity.Source{a, b} {
		identitytest.Run(t, s)
		identitytest.WaitStatus(t, s, "usable", usable)
	}
	path, w := serve(t, identity.NewCredentials(a, identity.CredentialOptions{Authorize: identity.Authorize(fe)}))
	must(t, check(t, client(t, path, identity.NewCredentials(b,
		identity.CredentialOptions{Authorize: identity.Authorize(devID)}))))
	if got := w.caller.Load(); got != fe {
		t.Fatalf("the server saw %v", got)
	}
	if _, ok := identity.PeerID(t.Context()); ok {
		t.Fatal("a peer ID without a connection")
	}
	for name, mode := range map[string]os.FileMode{"": 0o700, "ca.crt": 0o600, "ca.key": 0o600} {
		info, err := os.Stat(filepath.Join(dir, name))
		must(t, err)
		if got := info.Mode().Perm(); got != mode {
			t.Errorf("%s has mode %#o", info.Name(), got)
		}
	}
}

func TestDevAuthorityIsCreatedOnce(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "dev")
	bundles := make([]string, 20)
	var wg sync.WaitGroup
	for i := range bundles {
		wg.Go(func() {
			a, err := identity.OpenDevAuthority(t.Context(), dir)
			if err != nil {
				t.Error(err)
				return
			}
			b, err := a.Bundle(devID.TrustDomain()).Marshal()
			harness.Check(t, err)
			bundles[i] = string(b)
		})
	}
	wg.Wait()
	for _, b := range bundles {
		if b != bundles[0] {
			t.Fatal("two authorities in one directory")
		}
	}
}

func TestInvalidDevAuthority(t *testing.T) {
	for _, c := range []struct {
		name string
		harm func(dir string) error
		says string
	}{
		{
			"readable key", func(dir string) error { return os.Chmod(filepath.Join(dir, "ca.key"), 0o640) },
			"accessible to other users",
		},
		{"writable directory", func(dir string) error { return os.Chmod(dir, 0o777) }, "accessible to other users"},
		{"directory of the group", func(dir string) error { return os.Chmod(dir, 0o720) }, "accessible to other users"},
		{"directory of others", func(dir string) error { return os.Chmod(dir, 0o702) }, "accessible to other users"},
		{"foreign directory", func(dir string) error { return os.Chown(dir, 65534, 65534) }, "belongs to user 65534"},
		{
			"key of others", func(dir string) error { return os.Chmod(filepath.Join(dir, "ca.key"), 0o604) },
			"accessible to other users",
		},
		{
			"foreign key", func(dir string) error { return os.Chown(filepath.Join(dir, "ca.key"), 65534, 65534) },
			"belongs to user 65534",
		},
		{"no key", func(dir string) error { return os.Remove(filepath.Join(dir, "ca.key")) }, "remove"},
		{
			"bad key", func(dir string) error { return os.WriteFile(filepath.Join(dir, "ca.key"), []byte("x"), 0o600) },
			"remove",
		},
		{"bad certificate", func(dir string) error {
			return os.WriteFile(filepath.Join(dir, "ca.crt"), []byte("x"), 0o600)
		}, "remove"},
		{"another key", func(dir string) error {
			other := filepath.Join(dir, "other")
			if _, err := identity.OpenDevAuthority(t.Context(), other); err != nil {
				return err
			}
			return os.Rename(filepath.Join(other, "ca.key"), filepath.Join(dir, "ca.key"))
		}, "does not match"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "dev")
			_, err := identity.OpenDevAuthority(t.Context(), dir)
			must(t, err)
			must(t, c.harm(dir))
			if _, err := identity.OpenDevAuthority(t.Context(), dir); err == nil || !strings.Contains(err.Error(), c.says) {
				t.Fatalf("got %v", err)
			}
			if _, err := identity.NewDev(dir, devID, identity.Options{}); err == nil || !strings.Contains(err.Error(), c.says) {
				t.Fatalf("a source, before it runs: %v", err)
			}
		})
	}
}

func TestDevSourceRotatesAtHalfLife(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src, err := identity.NewDev(filepath.Join(t.TempDir(), "dev"), devID, identity.Options{DevTTL: 2 * time.Second})
		must(t, err)
		identitytest.Run(t, src)
		identitytest.WaitStatus(t, src, "usable", usable) // Ready is closed before the status says so
		start := time.Now()
		identitytest.WaitStatus(t, src, "rotated", func(s identity.Status) bool {
			if s.Overdue || s.Err != nil {
				t.Errorf("late: %+v", s)
			}
			return s.Rotations == 10
		})
		if d := time.Since(start); d < 10*time.Second || d > 16*time.Second {
			t.Fatalf("10 rotations of 2 s SVIDs took %v", d)
		}
	})
}

func TestDevSourceFollowsNewAuthority(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "dev")
	old, err := identity.NewDev(dir, devID, identity.Options{})
	must(t, err)
	identity.SetPoll(old, 10*time.Millisecond)
	identitytest.Run(t, old)
	first := identitytest.WaitStatus(t, old, "usable", usable)
	must(t, os.RemoveAll(dir))
	a, err := identity.OpenDevAuthority(t.Context(), dir)
	must(t, err)
	identitytest.WaitStatus(t, old, "rotated", func(s identity.Status) bool { return s.Serial != first.Serial })
	b, err := old.GetX509BundleForTrustDomain(devID.TrustDomain())
	if err != nil || !b.Equal(a.Bundle(devID.TrustDomain())) {
		t.Fatalf("still the old authority: %v", err)
	}
}

func TestUnreadableDevAuthorityIsReported(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "dev")
	source, err := identity.NewDev(dir, devID, identity.Options{})
	must(t, err)
	identity.SetPoll(source, 10*time.Millisecond)
	identitytest.Run(t, source)
	identitytest.WaitStatus(t, source, "usable", usable)
	must(t, os.RemoveAll(dir))
	must(t, os.Symlink(dir, dir)) // a loop, which no user can read
	identitytest.WaitStatus(t, source, "failed", func(s identity.Status) bool { return s.RenewalErr != nil })
}

func TestDevSettings(t *testing.T) {
	for _, c := range []struct {
		dir  string
		id   spiffeid.ID
		ttl  time.Duration
		says string
	}{
		{t.TempDir(), spiffeid.ID{}, 0, "has no path"},
		{t.TempDir(), spiffeid.RequireFromString("spiffe://dev.local"), 0, "has no path"},
		{t.TempDir(), devID, time.Second, "minimum is 2s"},
		{"", devID, 0, "no directory"},
		{"/dev/null/x", devID, 0, "not a directory"},
	} {
		_, err := identity.NewDev(c.dir, c.id, identity.Options{DevTTL: c.ttl})
		harness.WantError(t, err, c.says)
	}
}

func TestDevSourceCreatesNothingBeforeRun(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "dev")
	src, err := identity.NewDev(dir, devID, identity.Options{})
	must(t, err)
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Fatalf("the directory is there: %v", err)
	}
	// A directory that appears later with a wrong mode is reported with the same error as at the
	// start.
	must(t, os.Mkdir(dir, 0o700))
	must(t, os.Chmod(dir, 0o777))
	identitytest.Run(t, src)
	identitytest.WaitStatus(t, src, "refused", func(s identity.Status) bool {
		return s.Err != nil && strings.Contains(s.Err.Error(), "accessible to other users")
	})
	must(t, os.Chmod(dir, 0o700))
	identitytest.WaitStatus(t, src, "usable", usable)
}

func TestMintNeedsPath(t *testing.T) {
	a, err := identity.NewDevAuthority()
	must(t, err)
	if _, err := a.MintFor(spiffeid.RequireFromString("spiffe://dev.local"), time.Hour); err == nil {
		t.Fatal("an SVID for a trust domain")
	}
	if err := a.WriteFiles("/dev/null/x", identitytest.NewCA(t, "example.org").SVID(devID,
		time.Hour)); errors.Unwrap(err) == nil {
		t.Fatalf("got %v", err)
	}
}

// Several `lb svid` may write to one directory at the same time.
func TestConcurrentWriteFiles(t *testing.T) {
	a, err := identity.NewDevAuthority()
	must(t, err)
	dir := t.TempDir()
	var wg sync.WaitGroup
	for range 8 {
		svid, err := a.MintFor(devID, time.Hour)
		must(t, err)
		wg.Go(func() {
			for range 5 {
				harness.Check(t, a.WriteFiles(dir, svid))
			}
		})
	}
	wg.Wait()
	_, err = tls.LoadX509KeyPair(filepath.Join(dir, identity.CertFile), filepath.Join(dir, identity.KeyFile))
	must(t, err)
}
