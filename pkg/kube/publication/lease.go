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

// holds reports whether this process holds the Lease at least until the end of a write that
// starts now.
func (l *lease) holds() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.held && time.Since(l.renewed) < l.valid
}

// Get implements resourcelock.Interface.
func (l *lease) Get(ctx context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	record, raw, err := l.Interface.Get(ctx)
	switch {
	case err == nil:
		l.read(record.HolderIdentity)
	case apierrors.IsNotFound(err):
		l.read("")
	}
	return record, raw, err
}

func (l *lease) read(holder string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if holder == l.Identity() {
		return
	}
	l.held = false
	if holder != "" && !l.renewed.IsZero() {
		l.lost()
	}
}

// Create implements resourcelock.Interface.
func (l *lease) Create(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	begin := time.Now()
	return l.written(begin, record, l.Interface.Create(ctx, record))
}

// Update implements resourcelock.Interface. It does not release the Lease of another holder.
func (l *lease) Update(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	l.mu.Lock()
	foreign := record.HolderIdentity == "" && !l.held
	l.mu.Unlock()
	if foreign {
		return nil
	}
	begin := time.Now()
	return l.written(begin, record, l.Interface.Update(ctx, record))
}

func (l *lease) written(begin time.Time, record resourcelock.LeaderElectionRecord, err error) error {
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.held, l.renewed = record.HolderIdentity == l.Identity(), begin
	return nil
}
