package siblings

import (
	"context"
	"encoding/json"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	"github.com/vipgate/vipgate/pkg/kube/publication"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/test/await"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// frontend records the notifications.
type frontend struct {
	frontendv1.UnimplementedFrontendServiceServer
	received chan string
}

func (f *frontend) SetAdvertisedElsewhere(_ context.Context, r *frontendv1.SetAdvertisedElsewhereRequest,
) (*frontendv1.SetAdvertisedElsewhereResponse, error) {
	f.received <- strings.Join(r.GetVips(), " ")
	return &frontendv1.SetAdvertisedElsewhereResponse{}, nil
}

// pods returns a trench of two pods with the VIPs in the report of the second.
func pods(t *testing.T, vips string) (input publication.Input) {
	t.Helper()
	input.Reports = map[types.UID]publication.Reported{}
	for name, vips := range map[string]string{"a": `{"vip": "20.0.0.9/32", "advertised": true}`, "b": vips} {
		var reported publication.Reported
		if err := json.Unmarshal([]byte(`{"vips": [`+vips+`]}`), &reported.Report); err != nil {
			t.Fatal(err)
		}
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name)}}
		input.Siblings, input.Reports[pod.UID] = append(input.Siblings, pod), reported
	}
	return input
}

// The frontend is notified which VIPs other pods announce, again after each change, and not while
// the reports may be outdated.
func TestFrontendIsNotified(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "frontend.sock")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	f := &frontend{received: make(chan string)}
	server := grpc.NewServer()
	frontendv1.RegisterFrontendServiceServer(server, f)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	ctx, cancel := context.WithCancel(t.Context())
	current := make(chan bool)
	input := latest.New(pods(t, `{"vip": "20.0.0.1/32", "advertised": true}`))
	notifier := New(Options{
		Pod: "a", AdminSocket: socket, Input: input, Log: slog.New(slog.DiscardHandler),
		Current: func() bool {
			select {
			case is := <-current:
				return is
			case <-ctx.Done():
				return false
			}
		},
	})
	ended := make(chan error, 1)
	go func() { ended <- notifier.Run(ctx) }()
	want := func(vips string) {
		t.Helper()
		if got := await.Receive(t, vips, f.received); got != vips {
			t.Errorf("received %q, want %q", got, vips)
		}
	}
	current <- true
	want("20.0.0.1/32")
	input.Set(pods(t, `{"vip": "20.0.0.1/32", "advertised": true, "reason": "Drained"},
		{"vip": "20.0.0.2/32", "advertised": true}, {"vip": "20.0.0.3/32", "advertised": false}`))
	current <- true
	want("20.0.0.2/32")
	input.Set(pods(t, ""))
	current <- false
	input.Set(pods(t, `{"vip": "20.0.0.4/32", "advertised": true}`))
	current <- true
	want("20.0.0.4/32")
	cancel()
	<-ended
	server.Stop()
	<-served
}
