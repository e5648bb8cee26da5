package identity

import (
	"context"
	"io/fs"
	"net"
	"time"

	"github.com/spiffe/go-spiffe/v2/bundle/x509bundle"
	"github.com/spiffe/go-spiffe/v2/svid/x509svid"
	"google.golang.org/grpc/credentials"
)

// SetSilence sets how long a stream of the Workload API may be silent.
func SetSilence(s *Source, d time.Duration) { s.origin.(*workloadAPI).silence = d }

// Bind is the bare bind of Listen.
func Bind(ctx context.Context, path string, mode fs.FileMode) (*net.UnixListener, error) {
	return bind(ctx, path, mode)
}

// ManualOrigin is an origin that a test drives.
type ManualOrigin struct{}

func (ManualOrigin) String() string { return "the test" }

func (ManualOrigin) watch(ctx context.Context, _ *Source) error {
	<-ctx.Done()
	return ctx.Err()
}

// NewManualSource returns a source that knows only what Offer and Fail say.
func NewManualSource(o Options) *Source { return newSource(ManualOrigin{}, o.withDefaults()) }

// Offer hands SVIDs to the source as an origin would.
func (s *Source) Offer(b x509bundle.Source, svids ...*x509svid.SVID) { s.offer(svids, b) }

// Fail hands a failure to the source as an origin would.
func (s *Source) Fail(err error) { s.fail(err) }

// DenialLog is the rate-limited log of refusals.
type DenialLog = denialLog

// NewDenialLog returns one that writes to out.
var NewDenialLog = newDenialLog

// Log logs a refusal.
func (d *denialLog) Log(key, message string) { d.log(key, message) }

// Keys tells how many keys are remembered.
func (d *denialLog) Keys() int { return len(d.buckets) }

// SetAdminUser sets the user whose processes are served beside root's.
func SetAdminUser(c credentials.TransportCredentials, uid uint32) { c.(*adminCredentials).uid = uid }

// PollOnly makes a source of files do without notifications.
func PollOnly(s *Source) { s.origin.(*fileSource).pollOnly = true }
