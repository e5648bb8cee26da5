package lb

import (
	"testing"

	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/targetset"
)

func TestAliveTargets(t *testing.T) {
	view := func(stream, name string, state healthcheck.State, origins ...targetset.Origin) targetset.View {
		shown := targetset.View{Health: healthcheck.Health{
			Key: healthcheck.Key{Stream: stream, Name: name}, State: state,
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
	synced, starting := alive(views, true), alive(views, false)
	for name, want := range map[[2]string][2]bool{
		{"web", "ready"}:   {true, true},
		{"web", "failed"}:  {false, true},
		{"web", "drained"}: {false, true},
		{"dns", "ready"}:   {false, false},
		{"ftp", "ready"}:   {false, false},
		{"new", "unknown"}: {false, true},
	} {
		if got := [2]bool{synced(name[0], name[1]), starting(name[0], name[1])}; got != want {
			t.Errorf("%v is alive: %v, want %v", name, got, want)
		}
	}
}
