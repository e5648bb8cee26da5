// Package speaker observes the sessions of a BGP speaker that another program runs and configures.
package speaker

import (
	"context"
	"net/netip"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// Session is the state of one address family of a session between the speaker and a peer.
type Session struct {
	Peer      netip.Addr // zero for a peer without an address yet (RFC 5549 on an interface)
	Name      string     // interface, protocol or description, as the speaker has it
	Family    vip.Family
	Up        bool      // established, and the family negotiated
	State     string    // in the speaker's words
	Since     time.Time // when the state began; zero if unknown
	Imported  int       // prefixes that the speaker accepted from the peer
	Exported  int       // prefixes that the speaker sends to the peer; -1 if unknown
	LastError string    // why the last session ended, "" if unknown
}

// View reads a speaker. Its methods honor the context's deadline and bound what they read.
type View interface {
	// Sessions returns the version of the speaker, and one session per peer and family. The
	// announcers' own sessions are among them; the Observer ignores them.
	Sessions(ctx context.Context) (version string, list []Session, err error)
	// Exported returns the VIPs that the speaker sends to the peer; [ErrUnknown] without routes.
	Exported(ctx context.Context, peer netip.Addr, family vip.Family) (vip.Set, error)
}

// LateView is a view whose answers may be minutes old. They are displayed, but withdraw no VIP: the
// session may be up again.
type LateView interface {
	View
	Late()
}
