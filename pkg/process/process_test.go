package process

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"go.uber.org/goleak"
	"google.golang.org/grpc"

	"github.com/vipgate/vipgate/pkg/health"
	"github.com/vipgate/vipgate/pkg/logs"
	"github.com/vipgate/vipgate/pkg/metrics"
	"github.com/vipgate/vipgate/pkg/task"
	"github.com/vipgate/vipgate/test/harness"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// sequence records the order of events.
type sequence struct {
	mu     sync.Mutex
	events []string
}

func (j *sequence) add(event string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.events = append(j.events, event)
}

// recorded is a task that records its end. With an error it fails immediately.
type recorded struct {
	name    string
	journal *sequence
	err     error
}

func (r recorded) String() string { return r.name }

func (r recorded) Run(ctx context.Context) error {
	if r.err != nil {
		return r.err
	}
	<-ctx.Done()
	r.journal.add(r.name)
	return ctx.Err()
}

// newProcess returns a process with open listeners and the address of its admin socket.
func newProcess(t *testing.T) (p *Process, socket string) {
	t.Helper()
	socket = filepath.Join(t.TempDir(), "admin.sock")
	p = New(Settings{
		Version: "test", AdminSocket: socket, HealthAddr: "127.0.0.1:0", MetricsAddr: "127.0.0.1:0",
		Log: slog.New(slog.DiscardHandler), Level: &logs.Level{},
	}, metrics.NewLB("test"))
	harness.Must(t, p.Listen(t.Context(), Services{Admin: func(grpc.ServiceRegistrar) {}}))
	return p, socket
}

func TestStagesEndInOrder(t *testing.T) {
	broken := errors.New("broken")
	for name, c := range map[string]struct {
		end  func(stop chan<- struct{}, cancel func())
		err  error // of a task of the second stage
		want []string
	}{
		"signal": {
			func(stop chan<- struct{}, _ func()) { stop <- struct{}{} }, nil, []string{"drain", "first", "second"},
		},
		"context":     {func(_ chan<- struct{}, cancel func()) { cancel() }, nil, []string{"first", "second"}},
		"failed task": {func(chan<- struct{}, func()) {}, broken, []string{"first"}},
	} {
		t.Run(name, func(t *testing.T) {
			p, socket := newProcess(t)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			j, stop := &sequence{}, make(chan struct{}, 1)
			c.end(stop, cancel)
			err := p.Run(ctx, stop, Plan{
				Stages: [][]task.Task{{recorded{"first", j, nil}}, {recorded{"second", j, c.err}}},
				Drain: func(context.Context, <-chan struct{}) {
					// The listeners serve until the drain has ended.
					harness.Check(t, health.CheckClient(t.Context(), "unix://"+socket, AdminSocket))
					j.add("drain")
				},
			})
			if !errors.Is(err, c.err) || (err == nil) != (c.err == nil) || !slices.Equal(j.events, c.want) {
				t.Errorf("error %v, events %q, want %q", err, j.events, c.want)
			}
			if conn, err := net.Dial("unix", socket); err == nil {
				conn.Close()
				t.Error("the admin socket is still served")
			}
		})
	}
}

// A process that does not run closes its listeners, and names the listener that failed.
func TestListenFailure(t *testing.T) {
	p, socket := newProcess(t)
	second := New(Settings{AdminSocket: socket, Log: slog.New(slog.DiscardHandler)}, metrics.NewLB("test"))
	err := second.Listen(t.Context(), Services{Admin: func(grpc.ServiceRegistrar) {}})
	harness.WantError(t, err, "admin socket")
	p.Close()
	if conn, err := net.Dial("unix", socket); err == nil {
		conn.Close()
		t.Error("the admin socket is still served")
	}
}
