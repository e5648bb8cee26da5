package nsp

import (
	"context"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	nspv1 "github.com/vipgate/vipgate/pkg/api/nsp/v1"
	"github.com/vipgate/vipgate/pkg/files"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/task"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/identitytest"
	"github.com/vipgate/vipgate/test/nsptest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fixture is an NSP of the trench t with the attractor a, which is not started, and the options
// of a client.
type fixture struct {
	*nsptest.NSP
	t    *testing.T
	o    Options
	log  *lines
	keys *keys
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	ca := identitytest.NewCA(t, "example.org")
	own := ca.Source(ca.SVID(ca.ID("/ns/default/sa/frontend"), time.Hour))
	f := &fixture{
		t: t, log: &lines{}, keys: &keys{},
		NSP: nsptest.New(nsptest.Options{
			Credentials: nsptest.ServerCredentials(ca.SVID(ca.ID("/ns/default/sa/nsp"), time.Hour), ca.Bundle()),
		}),
	}
	f.o = Options{
		Credentials: identity.NewCredentials(own, identity.CredentialOptions{Authorize: identity.AuthorizeOwnDomain(own)}),
		Trench:      "t", Attractor: "a", Defaults: trench.DefaultDefaults(), Host: "pod-1",
		Cache: filepath.Join(t.TempDir(), "nsp.json"), EntryTimeout: time.Hour, MaxBackoff: 100 * time.Millisecond,
		MaxRemoval: 100, KeepaliveTime: time.Minute, Keys: f.keys, Log: slog.New(slog.NewTextHandler(f.log, nil)),
	}
	t.Cleanup(func() {
		harness.Check(t, f.Stop())
		if t.Failed() {
			t.Logf("log:\n%s", f.log.String())
		}
	})
	// Before the first start the address is unknown.
	f.start()
	f.o.Target = f.Addr()
	return f
}

func (f *fixture) start() {
	f.t.Helper()
	harness.Must(f.t, f.Start())
}

func (f *fixture) stop() {
	f.t.Helper()
	harness.Must(f.t, f.Stop())
}

// run runs a task until the test ends, or end is called.
func (f *fixture) run(x task.Task) (end func()) {
	f.t.Helper()
	return harness.Run(f.t, x.Run)
}

// source runs a source until the test ends, or end is called.
func (f *fixture) source() (s *Source, end func()) {
	f.t.Helper()
	s = NewSource(f.o)
	// A write continues after the end of its context, and would race with the removal of its
	// directory.
	f.t.Cleanup(func() {
		await.True(f.t, "the end of a write", func() bool {
			_, err := files.Do(context.Background(), &s.cache.calls, f.o.Cache, func() (bool, error) { return true, nil })
			return err == nil
		})
	})
	return s, f.run(s)
}

// lines holds the logged lines.
type lines struct{ harness.Log }

// count returns the number of lines that contain the text.
func (l *lines) count(text string) int { return strings.Count(l.String(), text) }

// keys counts the calls of Want, one per converted list.
type keys struct {
	mu    sync.Mutex
	calls int
	last  map[string][]string
}

func (k *keys) File(source, key string) string { return "/keys/" + source + "/" + key }

func (k *keys) Want(sources map[string][]string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.calls++
	k.last = sources
}

func (k *keys) wanted() (int, map[string][]string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.calls, k.last
}

// attractor returns the attractor a of the trench t.
func attractor(vips []*nspv1.Vip, gateways ...*nspv1.Gateway) *nspv1.Attractor {
	return &nspv1.Attractor{Name: "a", Trench: &nspv1.Trench{Name: "t"}, Vips: vips, Gateways: gateways}
}

// vips returns VIPs called vip-1 and so on.
func vips(addresses ...string) []*nspv1.Vip {
	var list []*nspv1.Vip
	for i, a := range addresses {
		list = append(list, &nspv1.Vip{Name: "vip-" + string(rune('1'+i)), Address: a, Trench: &nspv1.Trench{Name: "t"}})
	}
	return list
}

func gateway(name, address string) *nspv1.Gateway {
	family := "ipv4"
	if strings.Contains(address, ":") {
		family = "ipv6"
	}
	return &nspv1.Gateway{
		Name: name, Address: address, IpFamily: family, Protocol: "bgp", Trench: &nspv1.Trench{Name: "t"},
	}
}

// wantGeneration waits until a generation is in force, and returns it.
func wantGeneration(t *testing.T, s *Source, generation uint64) trench.Loaded {
	t.Helper()
	await.True(t, "a configuration", func() bool { return s.Value().Load().Generation >= generation })
	l := s.Value().Load()
	if l.Generation != generation {
		t.Fatalf("generation %d is in force, want %d", l.Generation, generation)
	}
	return l
}

// text returns the VIPs and the gateways of a configuration.
func text(c *trench.Config) string {
	var parts []string
	for _, v := range c.Attractor.VIPs {
		parts = append(parts, v.String())
	}
	for _, g := range c.Attractor.Gateways {
		parts = append(parts, g.Name)
	}
	return strings.Join(parts, " ")
}
