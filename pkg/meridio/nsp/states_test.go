package nsp

import (
	"errors"
	"reflect"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	nspv1 "github.com/vipgate/vipgate/pkg/api/nsp/v1"
	"github.com/vipgate/vipgate/pkg/durable"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
)

// The state of a source that started from its cache, after each list and each end of a watch.
func TestSourceAfterCache(t *testing.T) {
	received := time.Now().Add(-time.Hour).UTC().Truncate(time.Second)
	f := newFixture(t)
	list := []byte(`{"name":"a","trench":{"name":"t"},` +
		`"vips":[{"name":"v","address":"20.0.0.1/32","trench":{"name":"t"}}]}`)
	harness.Must(t, durable.Write(f.o.Cache, &cached{Trench: "t", Attractor: "a", Received: received, List: list}))
	s := NewSource(f.o)
	if stale := s.Stale().Load(); stale == nil || !stale.Since.Equal(received) {
		t.Fatalf("stale %+v, want since %v", stale, received)
	}
	of := func(address string) *nspv1.AttractorResponse {
		return &nspv1.AttractorResponse{Attractors: []*nspv1.Attractor{attractor(vips(address))}}
	}
	take := func(address string) func() {
		return func() {
			s.connected()
			s.takeResponse(of(address))
		}
	}
	end := func() { s.fail(errors.New("EOF")) }
	refuse := func() {
		valid := s.options.Defaults
		s.options.Defaults = trench.Defaults{}
		take("20.0.0.2/32")()
		s.options.Defaults = valid
	}
	for i, step := range []struct {
		input                       func()
		vips                        string
		fromCache, connected, stale bool
		written                     string // the newest list for the cache
	}{
		{func() {}, "20.0.0.1/32", true, false, true, ""},
		{end, "20.0.0.1/32", true, false, true, ""},
		{refuse, "20.0.0.1/32", true, true, false, "20.0.0.1/32"},
		{take("20.0.0.3/32"), "20.0.0.3/32", false, true, false, "20.0.0.3/32"},
		{end, "20.0.0.3/32", false, true, false, "20.0.0.3/32"}, // 4: the next watch may be open soon
		{take("20.0.0.3/32"), "20.0.0.3/32", false, true, false, "20.0.0.3/32"},
		{end, "20.0.0.3/32", false, true, false, "20.0.0.3/32"},
		{end, "20.0.0.3/32", false, false, true, "20.0.0.3/32"}, // 7: it was not
		{take("20.0.0.4/32"), "20.0.0.4/32", false, true, false, "20.0.0.4/32"},
	} {
		step.input()
		written := ""
		if wanted := s.cache.wanted.Load(); wanted != nil {
			var list nspv1.Attractor
			harness.Must(t, protojson.Unmarshal(wanted.List, &list))
			written = list.GetVips()[0].GetAddress()
		}
		st := s.State().Load()
		if got := text(s.Value().Load().Config); got != step.vips || st.FromCache != step.fromCache ||
			st.Connected != step.connected || (s.Stale().Load() != nil) != step.stale || written != step.written {
			t.Errorf("%d: %s in force, %+v, stale %v, written %q", i, got, st, s.Stale().Load(), written)
		}
	}
}

// Want does not receive the keys of gateways that are not in force, or that have no password.
func TestWantedKeys(t *testing.T) {
	with := func(g *nspv1.Gateway, source, key string) *nspv1.Gateway {
		g.BgpAuth = &nspv1.Gateway_BgpAuth{KeySource: source, KeyName: key}
		return g
	}
	static := with(gateway("static", "169.254.100.153"), "gw", "static")
	static.Protocol = "static"
	f := newFixture(t)
	s := NewSource(f.o)
	s.take(s.options.pick([]*nspv1.Attractor{attractor(vips("20.0.0.1/32"),
		with(gateway("one", "169.254.100.150"), "gw", "one"), with(gateway("two", "169.254.100.151"), "gw", "two"),
		with(gateway("same key", "169.254.100.152"), "gw", "one"), with(gateway("taken", "169.254.100.150"), "gw", "taken"),
		with(gateway("no address", "x"), "other", "k"), gateway("open", "169.254.100.154"), static)}))
	_, wanted := f.keys.wanted()
	names := map[string]bool{}
	for _, g := range s.Value().Load().Config.Attractor.Gateways {
		names[g.Name] = true
	}
	want := map[string][]string{"gw": {"one", "two"}}
	if !names["two"] || !names["static"] || names["no address"] {
		t.Fatalf("in force are %v", names)
	}
	if !reflect.DeepEqual(wanted, want) {
		t.Errorf("wanted are %v, want %v; in force are %v", wanted, want, names)
	}
}

// A frontend that could not reach the NSP removes the entry of its killed predecessor when it
// stops.
func TestEarlierEntryAtTheStop(t *testing.T) {
	f := newFixture(t)
	_, _, end := f.registration(true)
	f.wantTargets(1)
	f.stop()
	end()
	f.o.MaxBackoff = time.Hour
	r, _, end := f.registration(false)
	await.True(t, "failures", func() bool { return r.State().Load().Failures >= 5 })
	f.start()
	f.wantTargets(1)
	end()
	f.wantTargets(0)
}
