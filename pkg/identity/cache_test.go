package identity_test

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spiffe/go-spiffe/v2/svid/x509svid"

	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/identitytest"
)

// cacheFixture is a Workload API and the cache file of an earlier run.
type cacheFixture struct {
	t    *testing.T
	ca   *identitytest.CA
	api  *identitytest.WorkloadAPI
	o    identity.Options
	svid *x509svid.SVID // in the cache
}

func newCacheFixture(t *testing.T, svid func(*identitytest.CA) *x509svid.SVID) *cacheFixture {
	t.Helper()
	ca := identitytest.NewCA(t, "example.org")
	f := &cacheFixture{
		t: t, ca: ca, api: identitytest.NewWorkloadAPI(t), svid: svid(ca),
		o: identity.Options{ID: ca.ID("/lb"), Cache: filepath.Join(t.TempDir(), "run", "svid.json")},
	}
	federated := identitytest.NewCA(t, "example.net")
	f.api.Offer(ca, []*x509svid.SVID{f.svid}, federated.Bundle())
	f.api.Start()
	earlier := f.o
	earlier.ID = f.svid.ID
	src := workloadSource(t, f.api, earlier)
	stop := identitytest.Run(t, src)
	await.True(t, "the cache", func() bool { _, err := os.Stat(f.o.Cache); return err == nil })
	stop()
	f.api.Stop()
	return f
}

func anHour(ca *identitytest.CA) *x509svid.SVID { return ca.SVID(ca.ID("/lb"), time.Hour) }

// edit changes a field of the file.
func (f *cacheFixture) edit(field string, value any) {
	f.t.Helper()
	content := map[string]any{}
	data, err := os.ReadFile(f.o.Cache)
	if err == nil {
		err = json.Unmarshal(data, &content)
	}
	must(f.t, err)
	content[field] = value
	if data, err = json.Marshal(content); err == nil {
		err = os.WriteFile(f.o.Cache, data, 0o600)
	}
	must(f.t, err)
}

func TestCachedSVID(t *testing.T) {
	f := newCacheFixture(t, anHour)
	log, logger := newJournal()
	f.o.Log = logger
	src := workloadSource(t, f.api, f.o)
	identitytest.Run(t, src)
	st := identitytest.WaitStatus(t, src, "usable", usable)
	if !st.Cached || st.Serial != serialOf(f.svid) || st.RenewalErr == nil {
		t.Fatalf("got %+v", st)
	}
	if got, err := src.GetX509SVID(); err != nil || got.ID != f.o.ID {
		t.Fatalf("got %v, %v", got, err)
	}
	for _, domain := range []string{"example.org", "example.net"} {
		td := identitytest.NewCA(t, domain).ID("/x").TrustDomain()
		if b, err := src.GetX509BundleForTrustDomain(td); err != nil || b.Empty() {
			t.Errorf("bundle of %s: %v, %v", domain, b, err)
		}
	}
	// The Workload API answers again.
	old, err := os.ReadFile(f.o.Cache)
	must(t, err)
	fresh := anHour(f.ca)
	f.api.Offer(f.ca, []*x509svid.SVID{fresh})
	f.api.Start()
	st = identitytest.WaitStatus(t, src, "rotated", func(s identity.Status) bool { return s.Serial == serialOf(fresh) })
	if st.Cached || st.RenewalErr != nil || st.Rotations != 1 {
		t.Errorf("got %+v", st)
	}
	log.wait(t, map[string]any{"msg": "cached SVID in use", "level": "WARN"})
	log.wait(t, map[string]any{"msg": "SVID rotated"})
	await.True(t, "the next cache", func() bool {
		now, err := os.ReadFile(f.o.Cache)
		return err == nil && !bytes.Equal(now, old)
	})
}

// A cached SVID ends at its NotAfter.
func TestCachedSVIDExpires(t *testing.T) {
	f := newCacheFixture(t, func(ca *identitytest.CA) *x509svid.SVID { return ca.SVID(ca.ID("/lb"), 4*time.Second) })
	src := workloadSource(t, f.api, f.o)
	identitytest.Run(t, src)
	if st := identitytest.WaitStatus(t, src, "usable", usable); !st.Cached {
		t.Fatalf("got %+v", st)
	}
	identitytest.WaitStatus(t, src, "expired", errSays("expired at", "no such file"))
	if now := time.Now(); !now.After(f.svid.Certificates[0].NotAfter) {
		t.Errorf("expired at %v", now)
	}
}

// An unexpected SVID from the Workload API is an answer, not an outage.
func TestCachedSVIDAfterAnswer(t *testing.T) {
	f := newCacheFixture(t, anHour)
	f.api.Offer(f.ca, []*x509svid.SVID{f.ca.SVID(f.ca.ID("/other"), time.Hour)})
	f.api.Start()
	src := workloadSource(t, f.api, f.o)
	identitytest.Run(t, src)
	identitytest.WaitStatus(t, src, "refused", errSays("does not offer", "/other"))
	f.api.Stop()
	identitytest.WaitStatus(t, src, "failing", func(s identity.Status) bool {
		return s.Failures >= 3 && errSays("Unavailable")(s)
	})
	if got, err := src.GetX509SVID(); err == nil {
		t.Errorf("got %v", got.ID)
	}
}

func TestRefusedCache(t *testing.T) {
	for _, c := range []struct {
		name   string
		svid   func(*identitytest.CA) *x509svid.SVID
		change func(*cacheFixture) error
		says   []string
	}{
		{"another ID", func(ca *identitytest.CA) *x509svid.SVID {
			return ca.SVID(ca.ID("/frontend"), time.Hour)
		}, nil, []string{
			"has an SVID of spiffe://example.org/frontend, not of spiffe://example.org/lb",
		}},
		{"expired", func(ca *identitytest.CA) *x509svid.SVID {
			return ca.SVID(ca.ID("/lb"), time.Second)
		}, func(f *cacheFixture) error {
			await.True(f.t, "the end", func() bool { return time.Now().After(f.svid.Certificates[0].NotAfter) })
			return nil
		}, []string{"expired at", "local clock"}},
		{"readable by the group", anHour, func(f *cacheFixture) error { return os.Chmod(f.o.Cache, 0o640) }, []string{
			"has mode 0640",
		}},
		{"another owner", anHour, func(f *cacheFixture) error { return os.Chown(f.o.Cache, 10001, 10001) }, []string{
			"belongs to user 10001",
		}},
		{"symbolic link", anHour, func(f *cacheFixture) error {
			if err := os.Rename(f.o.Cache, f.o.Cache+".moved"); err != nil {
				return err
			}
			return os.Symlink(f.o.Cache+".moved", f.o.Cache)
		}, []string{"too many levels of symbolic links"}},
		{"directory", anHour, func(f *cacheFixture) error {
			if err := os.Remove(f.o.Cache); err != nil {
				return err
			}
			return os.Mkdir(f.o.Cache, 0o700)
		}, []string{"is not a regular file"}},
		{"truncated", anHour, func(f *cacheFixture) error { return os.Truncate(f.o.Cache, 100) }, []string{"corrupt"}},
		{"empty", anHour, func(f *cacheFixture) error { return os.Truncate(f.o.Cache, 0) }, []string{"corrupt"}},
		{"another key", anHour, func(f *cacheFixture) error {
			_, key, err := anHour(f.ca).MarshalRaw()
			f.edit("key", key)
			return err
		}, []string{"corrupt", "private key"}},
		{"another authority", anHour, func(f *cacheFixture) error {
			stranger := identitytest.NewCA(f.t, "example.org").Bundle().X509Authorities()[0]
			f.edit("bundles", map[string][]byte{"example.org": stranger.Raw})
			return nil
		}, []string{"not signed by the cached authorities"}},
		{"no bundle", anHour, func(f *cacheFixture) error { f.edit("bundles", nil); return nil }, []string{
			"not signed by the cached authorities", "example.org",
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newCacheFixture(t, c.svid)
			if c.change != nil {
				must(t, c.change(f))
			}
			log, logger := newJournal()
			f.o.Log = logger
			src := workloadSource(t, f.api, f.o)
			identitytest.Run(t, src)
			st := identitytest.WaitStatus(t, src, "refused",
				errSays(append(c.says, "no such file", "the cached SVID is refused", f.o.Cache)...))
			if _, err := src.GetX509SVID(); err == nil || st.Cached {
				t.Errorf("in use: %+v", st)
			}
			log.wait(t, map[string]any{"msg": "cached SVID refused", "level": "WARN"})
		})
	}
}

// A failure to write the file is logged once and has no other effect.
func TestCacheNotWritten(t *testing.T) {
	ca, api := identitytest.NewCA(t, "example.org"), identitytest.NewWorkloadAPI(t)
	api.Offer(ca, []*x509svid.SVID{anHour(ca)})
	api.Start()
	log, logger := newJournal()
	src := workloadSource(t, api, identity.Options{Cache: "/proc/absent/svid.json", Log: logger})
	identitytest.Run(t, src)
	identitytest.WaitStatus(t, src, "usable", usable)
	for range 2 {
		svid := anHour(ca)
		api.Offer(ca, []*x509svid.SVID{svid})
		identitytest.WaitStatus(t, src, "rotated", func(s identity.Status) bool { return s.Serial == serialOf(svid) })
	}
	failed := map[string]any{"msg": "failed to write the identity cache; a restart needs the Workload API"}
	log.wait(t, failed)
	if n := log.count(t, failed); n != 1 {
		t.Errorf("logged %d times", n)
	}
}

// A slow denial does not increase the back-off.
func TestBackoffAfterSlowDenial(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		next := identity.NewRetry()
		var delay time.Duration
		for range 10 {
			delay = next()
			time.Sleep(delay) // the attempt fails immediately
		}
		if delay < time.Second {
			t.Fatalf("the delay after 10 fast failures is %v", delay)
		}
		for range 3 {
			time.Sleep(5 * time.Second)
			if delay = next(); delay > 100*time.Millisecond {
				t.Fatalf("the delay after a slow failure is %v", delay)
			}
			time.Sleep(delay)
		}
	})
}
