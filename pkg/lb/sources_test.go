package lb

import (
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/targetset"
)

func TestAliveTargets(t *testing.T) {
	now := time.Now()
	view := func(stream, name string, state healthcheck.State, origins ...targetset.Origin) targetset.View {
		shown := targetset.View{Health: healthcheck.Health{
			Key: healthcheck.Key{Stream: stream, Name: name}, State: state, Since: now.Add(-time.Second),
		}}
		for _, origin := range origins {
			shown.Origins = shown.Origins.With(origin)
		}
		return shown
	}
	views := []targetset.View{
		view("web", "ready", healthcheck.Ready, targetset.OriginFile),
		view("web", "failed", healthcheck.NotReady, targetset.OriginFile),
		view("web", "drained", healthcheck.Drained, targetset.OriginFile),
		view("web", "registered", healthcheck.NotReady, targetset.OriginRegistry),
		view("dns", "ready", healthcheck.Ready, targetset.OriginFile),
		view("dns", "registered", healthcheck.Ready, targetset.OriginRegistry),
		view("ftp", "ready", healthcheck.Ready, targetset.OriginFile, targetset.OriginRegistry),
	}
	synced, held, starting := alive(views, now), alive(views, now.Add(-releaseTime)), alive(views, time.Time{})
	for name, want := range map[[2]string][3]bool{
		{"web", "ready"}:   {true, true, true},
		{"web", "failed"}:  {false, true, true},
		{"web", "drained"}: {false, true, true},
		{"dns", "ready"}:   {},
		{"ftp", "ready"}:   {},
		{"new", "unknown"}: {false, false, true},
	} {
		if got := [3]bool{
			synced(name[0], name[1]), held(name[0], name[1]), starting(name[0], name[1]),
		}; got != want {
			t.Errorf("%v is alive: %v, want %v", name, got, want)
		}
	}
}
