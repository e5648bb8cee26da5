package lb

import (
	"context"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/trench/change"
	"github.com/vipgate/vipgate/test/harness"
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

// The old check of a stream waits for a confirmation of the new one, which its target fails.
func TestHeldCheck(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	harness.Must(t, err)
	defer listener.Close()
	at := netip.MustParseAddr("127.0.0.1")
	for name, tt := range map[string]struct {
		maxRemoval          int
		confirmed, confirms string // by an operator, and by the file
		port                uint16 // that is confirmed
		held                bool
	}{
		"not confirmed":             {50, "v12345678", "t12345678", 1, true},
		"by an operator":            {50, "ID", "", 1, false},
		"by the file":               {50, "", "v12345678,ID", 1, false},
		"another edit, by operator": {50, "ID", "", 2, true},
		"another edit, by the file": {50, "", "ID", 2, true},
		"nothing is confirmed":      {100, "", "", 1, false},
	} {
		t.Run(name, func(t *testing.T) {
			p := &process{
				checker: healthcheck.New(healthcheck.Options{Log: quiet}),
				table:   readiness.NewTable(readiness.TableOptions{}),
			}
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- p.checker.Run(ctx) }()
			defer func() { cancel(); <-ended }()
			// await edits the check and waits for a state of the target.
			config := oneStream(vipA)
			config.Streams[0].Targets[0].IPs[0] = at
			await := func(condition func() bool) {
				for !condition() {
					<-p.checker.Changed()
					p.checker.Evaluate(time.Now())
				}
			}
			edit := func(port uint16) {
				config.Streams[0].Check.TCP.Port = port
				p.checker.Update(config.Streams, nil)
			}
			is := func(state healthcheck.State) func() bool {
				return func() bool { return p.checker.List()[0].State == state }
			}
			edit(uint16(listener.Addr().(*net.TCPAddr).Port))
			await(is(healthcheck.Ready))
			edit(1)
			await(func() bool { return len(p.checker.Held()) > 0 })
			was := config.Streams[0].Check
			was.TCP.Port, was.Interval = tt.port, time.Hour
			id := change.IdentifyChecks(map[string]trench.Check{"s": was})
			config.MaxRemoval, config.Confirm = tt.maxRemoval, strings.ReplaceAll(tt.confirms, "ID", id)
			got, held := p.hold(config, config, trench.Held{}, strings.ReplaceAll(tt.confirmed, "ID", id))
			if want := tt.held; got != config || (held.ID != "") != want || (held.Count() == 1) != want {
				t.Errorf("held %+v, want %v", held, want)
			}
			if tt.held {
				const text = "the removal of the old checks of streams (s), whose targets fail the new ones waits"
				if !strings.Contains(held.Problem(), text) {
					t.Error(held.Problem())
				}
				return
			}
			await(is(healthcheck.NotReady))
		})
	}
}
