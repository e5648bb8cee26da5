package nsp

import (
	"testing"

	nspv1 "github.com/vipgate/vipgate/pkg/api/nsp/v1"
	"github.com/vipgate/vipgate/test/await"
)

// A list without most VIPs waits for a confirmation, also across a restart; the password of a held
// gateway stays.
func TestHeldRemovals(t *testing.T) {
	f := newFixture(t)
	f.o.MaxRemoval = 50
	gw := gateway("gw4", "169.254.100.150")
	gw.BgpAuth = &nspv1.Gateway_BgpAuth{KeyName: "k", KeySource: "s"}
	f.SetAttractors(attractor(vips("20.0.0.1/32", "20.0.0.2/32", "20.0.0.3/32", "20.0.0.4/32"), gw))
	s, end := f.source()
	wantGeneration(t, s, 1)
	saved := func() bool { list, _ := s.cache.read(); return len(list.GetVips()) == 4 }
	await.True(t, "the list in the cache", saved)

	// The removal of the VIPs and of the last gateway is held, the additional VIP is in force.
	f.SetAttractors(attractor(vips("20.0.0.1/32", "20.0.0.5/32")))
	l := wantGeneration(t, s, 2)
	const inForce = "20.0.0.1/32 20.0.0.5/32 20.0.0.2/32 20.0.0.3/32 20.0.0.4/32 gw4"
	if got := text(l.Config); got != inForce || l.Held.Count() != 4 {
		t.Errorf("in force is %s, held %+v", got, l.Held)
	}
	if _, wanted := f.keys.wanted(); len(wanted["s"]) != 1 {
		t.Errorf("keys are %v", wanted)
	}
	if _, err := s.Confirm("v00000000"); err == nil {
		t.Error("another identifier was confirmed")
	}
	end()
	if !saved() {
		t.Error("the cache has the held list")
	}

	s, end = f.source()
	await.True(t, "the hold after a restart", func() bool { return s.Value().Load().Held.ID == l.Held.ID })
	f.SetAttractors(attractor(vips("20.0.0.1/32", "20.0.0.2/32", "20.0.0.3/32", "20.0.0.4/32"), gw))
	await.True(t, "the end of the hold", func() bool { return s.Value().Load().Held.ID == "" })
	f.SetAttractors(attractor(vips("20.0.0.1/32", "20.0.0.5/32")))
	await.True(t, "the hold", func() bool { return s.Value().Load().Held.ID == l.Held.ID })
	if _, err := s.Confirm(""); err != nil {
		t.Error(err)
	}
	await.True(t, "the confirmed list", func() bool {
		now := s.Value().Load()
		return text(now.Config) == "20.0.0.1/32 20.0.0.5/32" && now.Held.ID == ""
	})
	await.True(t, "no key", func() bool { _, wanted := f.keys.wanted(); return len(wanted) == 0 })
	await.True(t, "the confirmed list in the cache", func() bool {
		list, _ := s.cache.read()
		return len(list.GetVips()) == 2
	})
	end()
}
