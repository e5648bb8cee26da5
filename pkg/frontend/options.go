package frontend

import (
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"google.golang.org/grpc/credentials"

	"github.com/vipgate/vipgate/pkg/bird"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/kernel"
	"github.com/vipgate/vipgate/pkg/logs"
	"github.com/vipgate/vipgate/pkg/nsp"
	"github.com/vipgate/vipgate/pkg/readinessfile"
	"github.com/vipgate/vipgate/pkg/secret"
	"github.com/vipgate/vipgate/pkg/trench"
)

// Options configure a frontend. Every field is needed unless said otherwise.
type Options struct {
	Version string
	// TrenchFile is watched; Config is its content at the start, nil if it was refused.
	TrenchFile string
	Defaults   trench.Defaults
	Config     *trench.Config
	// NSP has the configuration in place of the trench file, unless it is nil.
	NSP *nsp.Options
	// Secrets has the passwords of the NSP's gateways. Nil without the NSP.
	Secrets *secret.Watcher

	// Directory of readiness files is the readiness source, unless it is nil. Unused without gating.
	Directory *readinessfile.Options
	// LBSocket is the load balancer's readiness socket. Unused without gating and with Directory.
	LBSocket string
	// Host is the host name of the pod, by which a load balancer of Meridio identifies itself. Default:
	// that of this process.
	Host string
	// Identity is the frontend's SVID, and Credentials authorize the load balancer. Nil where neither
	// LBSocket nor NSP is used.
	Identity      *identity.Source
	Credentials   credentials.TransportCredentials
	LoadBalancers []spiffeid.ID // IDs that may be the load balancer; used for a warning
	// Gate has the drain time, and whether and how readiness gates advertisements.
	Gate       gate.Options
	MaxBackoff time.Duration // between attempts to reach the load balancer

	// BIRD and Kernel are completed with the interface, the log and a password.
	BIRD   bird.Options
	Kernel kernel.Options

	AdminSocket             string
	HealthAddr, MetricsAddr string // host:port; an empty MetricsAddr serves none
	// HealthSocket is a unix socket for probes that run in the container; empty: none. The service
	// without a name has the state of Liveness there, see [health.Server.RegisterForContainer].
	HealthSocket string

	// Settle is the time for gateways to apply a withdrawal before it is reported.
	Settle time.Duration
	// ReadyTimeout bounds how long Readiness waits after a start for VIPs that are ready and not
	// advertised, from when all its other conditions hold.
	ReadyTimeout      time.Duration
	StaticAll         bool // static gateways attract traffic only while every VIP of a family is announced
	RequireRoute      bool // withdraw the VIPs of a family while no gateway advertises a route
	RemoveRulesOnExit bool // marks, rules and blackhole routes

	// Started is called once, when every ready VIP is advertised or ReadyTimeout ended the wait for
	// that; nil: not. It must not block.
	Started func()

	Log   *slog.Logger
	Level *logs.Level
	// LostLines returns the number of lines of the log that were lost since the start.
	LostLines func() uint64
	// MeridioSignals gives SIGUSR1 and SIGUSR2 Meridio's meaning, see [logs.NewMeridioSignals].
	MeridioSignals bool
}

const refusesEmpty = "an empty value is refused, since it would advertise VIPs that no load balancer forwards; "

// ErrNoSocket reports that gating is on and the readiness socket is empty.
var ErrNoSocket = errors.New("no readiness socket: " + refusesEmpty +
	"set --lb-socket (VIPGATE_LB_SOCKET), or switch gating off with --gating=off")

// ErrNoDirectory reports that the directory of readiness files is empty.
var ErrNoDirectory = errors.New("no readiness directory: " + refusesEmpty +
	"set --readiness-dir (VIPGATE_READINESS_DIR) to a directory such as /var/run/meridio, " +
	"omit it to use --lb-socket, or switch gating off with --gating=off")

func (o *Options) validate() error {
	switch {
	case !o.Gate.Ungated && o.Directory == nil && o.LBSocket == "":
		return ErrNoSocket
	case !o.Gate.Ungated && o.Directory != nil && o.Directory.Path == "":
		return ErrNoDirectory
	case o.Gate.DrainTime < 0 || o.Settle < 0:
		return fmt.Errorf("drain time %v and settle %v must not be negative", o.Gate.DrainTime, o.Settle)
	}
	return nil
}
