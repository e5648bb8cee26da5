package targetset

import (
	"net/netip"
	"testing"

	"github.com/vipgate/vipgate/pkg/healthcheck"
)

func TestWatchesOfIndex(t *testing.T) {
	r := NewIndex()
	key := func(name string) healthcheck.Key {
		return healthcheck.Key{Stream: "s", Name: name, Addr: netip.MustParseAddr("172.16.0.1")}
	}
	view := func(name string, s healthcheck.State) View {
		return View{Health: healthcheck.Health{Key: key(name), State: s}}
	}
	r.Publish([]View{view("a", healthcheck.Ready), view("b", healthcheck.Ready)}, nil)
	all, one := r.Watch(nil), r.WatchTargets([]healthcheck.Key{key("a")})
	for w, want := range map[*Watch]int{all: 2, one: 1} {
		<-w.Changed()
		if changed, removed := w.Take(); len(changed) != want || len(removed) != 0 {
			t.Errorf("at first %v, %v; want %d", changed, removed, want)
		}
	}
	r.Publish([]View{view("a", healthcheck.Ready), view("b", healthcheck.NotReady)}, nil)
	if changed, _ := all.Take(); len(changed) != 1 || changed[0].Name != "b" {
		t.Errorf("changed %v", changed)
	}
	if changed, removed := one.Take(); len(changed)+len(removed) != 0 {
		t.Errorf("a change of another target is reported: %v, %v", changed, removed)
	}
	r.Publish(nil, []healthcheck.Key{key("a")})
	for _, w := range []*Watch{all, one} {
		if changed, removed := w.Take(); len(changed) != 0 || len(removed) != 1 {
			t.Errorf("after a removal %v, %v", changed, removed)
		}
		w.Close()
	}
	if len(r.watches) != 0 {
		t.Errorf("closed watches are kept: %v", r.watches)
	}
}
