package nsp

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	nspv1 "github.com/vipgate/vipgate/pkg/api/nsp/v1"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/identitytest"
)

func TestListInForce(t *testing.T) {
	f := newFixture(t)
	gw := gateway("gw4", "169.254.100.150")
	gw.BgpAuth = &nspv1.Gateway_BgpAuth{KeyName: "k", KeySource: "s"}
	f.SetAttractors(attractor(vips("20.0.0.1/32"), gw))
	s, _ := f.source()
	l := wantGeneration(t, s, 1)
	if text(l.Config) != "20.0.0.1/32 gw4" || l.Err != nil {
		t.Errorf("in force is %s with error %v", text(l.Config), l.Err)
	}
	if st := s.State().Load(); !st.Connected || st.FromCache || s.Stale().Load() != nil {
		t.Errorf("state is %+v, stale %v", st, s.Stale().Load())
	}
	if _, keys := f.keys.wanted(); len(keys) != 1 || len(keys["s"]) != 1 || keys["s"][0] != "k" {
		t.Errorf("keys are %v", keys)
	}
	f.SetAttractors(attractor(vips("20.0.0.1/32", "20.0.0.2/32"), gateway("gw4", "169.254.100.150")))
	if l := wantGeneration(t, s, 2); text(l.Config) != "20.0.0.1/32 20.0.0.2/32 gw4" {
		t.Errorf("in force is %s", text(l.Config))
	}
	await.True(t, "no key", func() bool { _, keys := f.keys.wanted(); return len(keys) == 0 })
}

// The NSP repeats the list on every event of the trench. Repetitions are not parsed or logged.
func TestRepeatedLists(t *testing.T) {
	f := newFixture(t)
	f.SetAttractors(attractor(vips("20.0.0.1/32", "20.0.0.9"), gateway("gw4", "169.254.100.150")))
	s, _ := f.source()
	before := wantGeneration(t, s, 1)
	_, changed := s.Value().Get()
	await.True(t, "the end of the first list", func() bool { return f.log.count("new configuration") == 1 })
	logged := f.log.String()
	for range 1000 {
		f.Event()
	}
	// The new list arrives after all repetitions.
	f.SetAttractors(attractor(vips("20.0.0.2/32")))
	<-changed
	if l := wantGeneration(t, s, 2); l.Refused != before.Refused {
		t.Errorf("%d lists were refused, want %d", l.Refused, before.Refused)
	}
	if calls, _ := f.keys.wanted(); calls != 2 {
		t.Errorf("%d lists were converted, want 2", calls)
	}
	await.True(t, "the new list in the log", func() bool { return f.log.count("new configuration") == 2 })
	if n := strings.Count(strings.TrimPrefix(f.log.String(), logged), "\n"); n != 1 {
		t.Errorf("%d lines were logged after the repetitions, want that of the new list", n)
	}
}

func TestEmptyList(t *testing.T) {
	f := newFixture(t)
	f.SetAttractors(attractor(vips("20.0.0.1/32"), gateway("gw4", "169.254.100.150")))
	s, _ := f.source()
	wantGeneration(t, s, 1)
	f.SetAttractors()
	l := wantGeneration(t, s, 2)
	if len(l.Config.Attractor.VIPs)+len(l.Config.Attractor.Gateways) > 0 || l.Err != nil ||
		l.Config.Trench != "t" || l.Config.Attractor.Name != "a" {
		t.Errorf("in force is %+v with error %v", l.Config, l.Err)
	}
}

func TestRefusedObjects(t *testing.T) {
	f := newFixture(t)
	bad := gateway("bad", "169.254.100.160")
	bad.HoldTime = 2
	f.SetAttractors(attractor(vips("20.0.0.1/32", "20.0.0.2"), gateway("gw4", "169.254.100.150"), bad))
	s, _ := f.source()
	l := wantGeneration(t, s, 1)
	if text(l.Config) != "20.0.0.1/32 gw4" || l.Err == nil || !strings.Contains(l.Err.Error(), "VIP vip-2: ") ||
		!strings.Contains(l.Err.Error(), "gateway bad: ") {
		t.Errorf("in force is %s with error %v", text(l.Config), l.Err)
	}
	const message = "object of the NSP refused"
	await.True(t, "the log", func() bool { return f.log.count(message) == 2 })
	// An unrelated change does not log the same refusals again.
	f.SetAttractors(attractor(vips("20.0.0.1/32", "20.0.0.2"), bad))
	wantGeneration(t, s, 2)
	if n := f.log.count(message); n != 2 {
		t.Errorf("refusals were logged %d times, want once each", n)
	}
	f.SetAttractors(attractor(vips("20.0.0.1/32")))
	await.True(t, "no refusal", func() bool { return s.Value().Load().Err == nil })
	if n := len(s.State().Load().Refused); n != 0 {
		t.Errorf("the state has %d refusals", n)
	}
}

func TestAbsentNSP(t *testing.T) {
	f := newFixture(t)
	f.SetAttractors(attractor(vips("20.0.0.1/32")))
	f.stop()
	s, _ := f.source()
	await.True(t, "failures", func() bool { return s.State().Load().Failures >= 3 })
	l := s.Value().Load()
	if l.Generation != 0 || l.Err == nil || !strings.Contains(l.Err.Error(), "refused") {
		t.Errorf("without a cache, generation %d is in force, with error %v", l.Generation, l.Err)
	}
	f.start()
	wantGeneration(t, s, 1)
	await.True(t, "a confirmed list", func() bool { return s.Stale().Load() == nil })
}

func TestNSPRestart(t *testing.T) {
	f := newFixture(t)
	f.SetAttractors(attractor(vips("20.0.0.1/32")))
	s, _ := f.source()
	wantGeneration(t, s, 1)
	before := time.Now()
	f.stop()
	await.True(t, "a loss", func() bool { return s.Stale().Load() != nil })
	problem := s.Stale().Load()
	if !strings.Contains(problem.Cause, "NSP "+f.o.Target+": ") || problem.Since.Before(before) ||
		problem.Since.After(time.Now()) {
		t.Errorf("stale is %+v", problem)
	}
	await.True(t, "more failures", func() bool { return s.State().Load().Failures >= 4 })
	if st := s.State().Load(); st.Connected || st.FromCache {
		t.Errorf("state is %+v", st)
	}
	f.start()
	await.True(t, "the NSP", func() bool { return s.Stale().Load() == nil && s.State().Load().Connected })
	if l := s.Value().Load(); l.Generation != 1 || l.Err != nil || text(l.Config) != "20.0.0.1/32" {
		t.Errorf("generation %d is in force, with error %v", l.Generation, l.Err)
	}
	if calls, _ := f.keys.wanted(); calls != 1 {
		t.Errorf("%d lists were converted, want 1: the restarted NSP sent the same", calls)
	}
}

func TestSlowNSP(t *testing.T) {
	f := newFixture(t)
	f.SetAttractors(attractor(vips("20.0.0.1/32")))
	f.Delay(300 * time.Millisecond)
	s, _ := f.source()
	wantGeneration(t, s, 1)
	if st := s.State().Load(); st.Failures != 0 {
		t.Errorf("%d watches failed", st.Failures)
	}
}

// A watch without a list times out, and is opened again.
func TestNoList(t *testing.T) {
	f := newFixture(t)
	f.SetAttractors(attractor(vips("20.0.0.1/32")))
	f.Hang(true)
	s := NewSource(f.o)
	s.first = 50 * time.Millisecond
	f.run(s)
	await.True(t, "the reason", func() bool {
		return strings.Contains(s.Stale().Load().Problem(time.Now()), "no list within 50ms")
	})
	f.Hang(false)
	wantGeneration(t, s, 1)
}

// A stalled NSP does not affect the configuration, and does not delay the stop.
func TestStalledNSP(t *testing.T) {
	f := newFixture(t)
	f.SetAttractors(attractor(vips("20.0.0.1/32")))
	s, end := f.source()
	wantGeneration(t, s, 1)
	f.Freeze(true)
	stopped := time.Now()
	end()
	if d := time.Since(stopped); d > CallTimeout {
		t.Errorf("the stop took %v", d)
	}
	if l := s.Value().Load(); l.Generation != 1 || l.Err != nil {
		t.Errorf("generation %d is in force, with error %v", l.Generation, l.Err)
	}
}

func TestForeignNSP(t *testing.T) {
	f := newFixture(t)
	ca := identitytest.NewCA(t, "example.com")
	own := ca.Source(ca.SVID(ca.ID("/frontend"), time.Hour))
	f.o.Credentials = identity.NewCredentials(own, identity.CredentialOptions{Authorize: identity.AuthorizeOwnDomain(own)})
	s, _ := f.source()
	await.True(t, "a denial", func() bool {
		return strings.Contains(s.Stale().Load().Problem(time.Now()), "expected a member of trust domain example.com")
	})
}

func TestCache(t *testing.T) {
	f := newFixture(t)
	f.SetAttractors(attractor(vips("20.0.0.1/32", "20.0.0.2"), gateway("gw4", "169.254.100.150")))
	s, end := f.source()
	wantGeneration(t, s, 1)
	await.True(t, "the cache", func() bool { _, err := os.Stat(f.o.Cache); return err == nil })
	end()
	info, err := os.Stat(f.o.Cache)
	if err != nil || info.Mode() != 0o600 {
		t.Fatalf("mode is %v, error %v", info.Mode(), err)
	}
	f.stop()
	s, end = f.source()
	l := s.Value().Load()
	if text(l.Config) != "20.0.0.1/32 gw4" || l.Generation != 1 || !strings.Contains(l.Err.Error(), "VIP vip-2: ") {
		t.Errorf("from the cache, %s is in force in generation %d, with error %v", text(l.Config), l.Generation, l.Err)
	}
	await.True(t, "the reason", func() bool {
		return strings.Contains(s.Stale().Load().Cause, "refused; the list of "+f.o.Cache+" is in force")
	})
	if since := s.Stale().Load().Since; since.After(info.ModTime().Add(time.Second)) {
		t.Errorf("the configuration is stale since %v, want when the list was received", since)
	}
	if !s.State().Load().FromCache || f.log.count("configuration taken from the cache") != 1 {
		t.Errorf("not marked: %+v", s.State().Load())
	}
	// The same list, from the NSP.
	f.start()
	await.True(t, "the NSP", func() bool { return s.Stale().Load() == nil && !s.State().Load().FromCache })
	if l := s.Value().Load(); l.Generation != 1 {
		t.Errorf("generation %d is in force", l.Generation)
	}
	end()
	// An attractor of a different name, or of a different trench, does not use the cache.
	for i, name := range []*string{&f.o.Attractor, &f.o.Trench} {
		was := *name
		*name = "other"
		if l := NewSource(f.o).Value().Load(); l.Generation != 0 || f.log.count("it is of another attractor") != i+1 {
			t.Errorf("generation %d is in force", l.Generation)
		}
		*name = was
	}
}

// Every accepted list is written to the cache.
func TestCacheHasTheLastList(t *testing.T) {
	f := newFixture(t)
	s, end := f.source()
	for i, v := range []string{"20.0.0.1/32", "20.0.0.2/32", "20.0.0.3/32"} {
		f.SetAttractors(attractor(vips(v)))
		await.True(t, "the list in force", func() bool { return text(s.Value().Load().Config) == v })
		await.True(t, "the list in the cache", func() bool {
			data, err := os.ReadFile(f.o.Cache)
			return err == nil && strings.Contains(string(data), v)
		})
		if i == 2 {
			end()
			f.stop()
		}
	}
	if l := NewSource(f.o).Value().Load(); text(l.Config) != "20.0.0.3/32" {
		t.Errorf("from the cache, %s is in force", text(l.Config))
	}
}

// If the NSP ends each watch after its first list, the watch is opened again with back-off.
func TestWatchesThatEnd(t *testing.T) {
	f := newFixture(t)
	f.SetAttractors(attractor(vips("20.0.0.1/32")))
	f.EndWatches(true)
	f.o.MaxBackoff = time.Hour
	s, _ := f.source()
	await.True(t, "watches", func() bool { return len(f.Requests("WatchAttractor")) >= 6 })
	requests := f.Requests("WatchAttractor")
	for i, r := range requests[1:6] {
		least := time.Duration(float64(minBackoff<<i) * 0.79) // the jitter is 0.2
		if d := r.At.Sub(requests[i].At); d < least {
			t.Errorf("watch %d began %v after the one before, want at least %v", i+1, d, least)
		}
	}
	if l := s.Value().Load(); text(l.Config) != "20.0.0.1/32" || l.Generation != 1 {
		t.Errorf("%s is in force in generation %d", text(l.Config), l.Generation)
	}
	if st := s.State().Load(); st.Failures < 5 || !st.Connected {
		t.Errorf("the state is %+v", st)
	}
	// Each watch has sent a list, so the NSP counts as reachable.
	if stale := s.Stale().Load(); stale != nil || f.log.count("watch of the NSP failed") > 0 {
		t.Errorf("stale: %v", stale)
	}
}

// An NSP without the attractor differs from an unreachable NSP: its empty list is stored in the
// cache.
func TestCachedEmptyList(t *testing.T) {
	f := newFixture(t)
	s, end := f.source()
	wantGeneration(t, s, 1)
	await.True(t, "the cache", func() bool { _, err := os.Stat(f.o.Cache); return err == nil })
	end()
	if l := NewSource(f.o).Value().Load(); l.Generation != 1 || len(l.Config.Attractor.VIPs) > 0 {
		t.Errorf("generation %d is in force", l.Generation)
	}
}

func TestCorruptCache(t *testing.T) {
	for name, content := range map[string]string{
		"no JSON": "{", "another field": `{"x": 1}`, "another list": `{"trench":"t","attractor":"a","list":[]}`, "empty": "",
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			f.SetAttractors(attractor(vips("20.0.0.1/32")))
			harness.Must(t, os.WriteFile(f.o.Cache, []byte(content), 0o600))
			s, _ := f.source()
			if st := s.State().Load(); st.CacheFailures != 1 || f.log.count("moved aside") != 1 {
				t.Errorf("state is %+v", st)
			}
			wantGeneration(t, s, 1)
			await.True(t, "a new cache", func() bool {
				data, err := os.ReadFile(f.o.Cache)
				return err == nil && strings.Contains(string(data), "20.0.0.1/32")
			})
		})
	}
}

// A directory that cannot be written is logged once and counted, and written later.
func TestUnwritableCache(t *testing.T) {
	f := newFixture(t)
	f.SetAttractors(attractor(vips("20.0.0.1/32")))
	directory := filepath.Join(filepath.Dir(f.o.Cache), "absent")
	if err := os.WriteFile(directory, nil, 0o600); err != nil { // root can write to any directory
		t.Fatal(err)
	}
	f.o.Cache = filepath.Join(directory, "nsp.json")
	s, _ := f.source()
	wantGeneration(t, s, 1)
	await.True(t, "failed writes", func() bool { return s.State().Load().CacheFailures >= 3 })
	if n := f.log.count("failed to write the cache"); n != 1 {
		t.Errorf("the failure was logged %d times, want once", n)
	}
	harness.Must(t, os.Remove(directory))
	await.True(t, "a cache", func() bool { _, err := os.Stat(f.o.Cache); return err == nil })
	if l := s.Value().Load(); l.Generation != 1 || l.Err != nil {
		t.Errorf("generation %d is in force, with error %v", l.Generation, l.Err)
	}
}

// If a list is refused as a whole, the previous list stays in force.
func TestRefusedList(t *testing.T) {
	f := newFixture(t)
	f.SetAttractors(attractor(vips("20.0.0.1/32")))
	s, _ := f.source()
	wantGeneration(t, s, 1)
	f.o.Defaults = trench.Defaults{} // of the source's copy, below
	s2 := NewSource(f.o)
	f.run(s2)
	await.True(t, "a refusal", func() bool { return s2.Value().Load().Err != nil && s2.Value().Load().Refused == 1 })
	if text(s2.Value().Load().Config) != "" {
		t.Errorf("in force is %s", text(s2.Value().Load().Config))
	}
}

// connectivity is the external connectivity of a frontend.
type connectivity struct{ latest.Value[bool] }

func (c *connectivity) up() (bool, <-chan struct{}) { return c.Get() }
