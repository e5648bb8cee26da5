package siblings

import (
	"context"
	"log/slog"
	"maps"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	corev1 "k8s.io/api/core/v1"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/kube/frontendstatus"
	"github.com/vipgate/vipgate/pkg/kube/publication"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	// interval is the interval at which the frontend is notified again: it may have restarted.
	interval = 10 * time.Second
	// validFor is the time after which the frontend forgets the VIPs.
	validFor = 3 * interval
)

// Options configure a Notifier. All are required.
type Options struct {
	Pod string // name of this process's pod
	// AdminSocket is the path of the admin socket of the frontend in the same pod.
	AdminSocket string
	// Input has the pods of the Trench and their reports.
	Input *latest.Value[publication.Input]
	// Current reports whether the reports are current.
	Current func() bool
	Log     *slog.Logger
}

// Notifier notifies the frontend. It implements task.Task.
type Notifier struct{ Options }

// New returns a Notifier.
func New(options Options) *Notifier { return &Notifier{Options: options} }

// String implements task.Task.
func (*Notifier) String() string { return "VIPs of other pods" }

// Run notifies the frontend every interval and after each change, until ctx ends.
func (notifier *Notifier) Run(ctx context.Context) error {
	retry := backoff.Backoff{Min: 200 * time.Millisecond, Max: 5 * time.Second, Jitter: 0.2}
	var sent vip.Set
	var at time.Time
	for ctx.Err() == nil {
		input, changed := notifier.Input.Get()
		vips := publication.AdvertisedElsewhere(input, notifier.Pod, func(*corev1.Pod) bool { return false })
		due := interval - time.Since(at)
		if notifier.Current() && (due <= 0 || !maps.Equal(vips, sent)) {
			if err := notifier.notify(ctx, vips); err != nil {
				// The publication warns of a frontend that does not answer.
				notifier.Log.Debug("frontend not notified, retrying", "error", err)
				_ = retry.Wait(ctx)
				continue
			}
			retry.Reset()
			sent, at, due = vips, time.Now(), interval
		}
		select {
		case <-changed:
		case <-time.After(max(due, time.Second)):
		case <-ctx.Done():
		}
	}
	return ctx.Err()
}

// notify notifies the frontend once.
func (notifier *Notifier) notify(ctx context.Context, vips vip.Set) error {
	elsewhere := &frontendv1.SetAdvertisedElsewhereRequest{
		ValidFor: durationpb.New(validFor), Vips: vip.Texts(vips.Sorted()),
	}
	return frontendstatus.Call(ctx, notifier.AdminSocket,
		func(ctx context.Context, frontend frontendv1.FrontendServiceClient) error {
			_, err := frontend.SetAdvertisedElsewhere(ctx, elsewhere)
			return err
		})
}
