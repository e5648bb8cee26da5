package publication

import (
	"context"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
)

// lease wraps the Lease of one term, and records the holder in the API server's last answer. The
// elector of client-go reacts too late to another holder: it leads until its renew deadline, and
// clears that holder when it ends.
type lease struct {
	resourcelock.Interface
	valid time.Duration // from the start of a renewal: the Lease less the timeout of a write
	lost  func()        // called when another process holds the Lease after this one held it

	mu      sync.Mutex
	held    bool
	renewed time.Time // start of the last successful request; zero if the Lease was never held
}

// holds reports whether this process holds the Lease until the end of a write that starts now.
func (lease *lease) holds() bool {
	lease.mu.Lock()
	defer lease.mu.Unlock()
	return lease.held && time.Since(lease.renewed) < lease.valid
}

// Get implements resourcelock.Interface.
func (lease *lease) Get(ctx context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	record, raw, err := lease.Interface.Get(ctx)
	switch {
	case err == nil:
		lease.read(record.HolderIdentity)
	case apierrors.IsNotFound(err):
		// A deleted Lease has no holder.
		lease.read("")
	}
	return record, raw, err
}

func (lease *lease) read(holder string) {
	lease.mu.Lock()
	defer lease.mu.Unlock()
	if holder == lease.Identity() {
		return
	}
	lease.held = false
	if holder != "" && !lease.renewed.IsZero() {
		lease.lost()
	}
}

// Create implements resourcelock.Interface.
func (lease *lease) Create(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	begin := time.Now()
	return lease.written(begin, record, lease.Interface.Create(ctx, record))
}

// Update implements resourcelock.Interface. It does not release the Lease of another holder.
func (lease *lease) Update(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	lease.mu.Lock()
	foreign := record.HolderIdentity == "" && !lease.held
	lease.mu.Unlock()
	if foreign {
		return nil
	}
	begin := time.Now()
	return lease.written(begin, record, lease.Interface.Update(ctx, record))
}

func (lease *lease) written(begin time.Time, record resourcelock.LeaderElectionRecord, err error) error {
	if err != nil {
		return err
	}
	lease.mu.Lock()
	defer lease.mu.Unlock()
	// Count from the start, because the API server may handle the request at any time after it.
	lease.held, lease.renewed = record.HolderIdentity == lease.Identity(), begin
	return nil
}
