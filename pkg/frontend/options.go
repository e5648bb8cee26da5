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

// Options configures a frontend. Every field is required unless documented otherwise.
type Options struct {
	Version string
	// TrenchFile is watched; Config is its content at the start, nil if it was refused.
	TrenchFile string
	Defaults   trench.Defaults
	Config     *trench.Config
	// NSP replaces the trench file as the source of the configuration, unless it is nil.
	NSP *nsp.Options
	// Secrets provides the passwords of the NSP's gateways; nil without the NSP.
	Secrets *secret.Watcher

	// Directory selects a directory of readiness files as the readiness source, unless it is nil.
	// Unused without gating.
	Directory *readinessfile.Options
	// LBSocket is the load balancer's readiness socket. Unused without gating and with Directory.
	LBSocket string
	// Host is the host name of the pod, by which a Meridio load balancer identifies itself. The
	// default is os.Hostname.
	Host string
	// Identity is the frontend's SVID, and Credentials authorize the load balancer. Both are nil if
	// neither LBSocket nor NSP is used.
	Identity      *identity.Source
	Credentials   credentials.TransportCredentials
	LoadBalancers []spiffeid.ID // IDs that may be the load balancer; used for a warning
	// Gate configures the drain time and the gating of advertisements by readiness.
	Gate       gate.Options
	MaxBackoff time.Duration // between attempts to reach the load balancer

	// BIRD and Kernel lack the interface, the log and the password, which Run adds.
	BIRD   bird.Options
	Kernel kernel.Options

	AdminSocket             string
	HealthAddr, MetricsAddr string // host:port; an empty MetricsAddr disables metrics
	// HealthSocket is a unix socket for probes that run in the container; "" disables it. On this
	// socket, the service "" has the state of Liveness; see [health.Server.RegisterForContainer].
	HealthSocket string

	// Settle is the time for gateways to apply a withdrawal before it is reported.
	Settle time.Duration
	// ReadyTimeout bounds the time that Readiness waits after a start for ready VIPs to be
	// advertised. It starts when all other conditions of Readiness hold.
	ReadyTimeout      time.Duration
	StaticAll         bool // static gateways attract traffic only while every VIP of a family is announced
	RequireRoute      bool // withdraw the VIPs of a family while no gateway advertises a route
	RemoveRulesOnExit bool // marks, rules and blackhole routes

	// Started, unless nil, is called once, when every ready VIP is advertised or ReadyTimeout
	// expired. It must not block.
	Started func()

	Log   *slog.Logger
	Level *logs.Level
	// LostLines returns the number of log lines lost since the start.
	LostLines func() uint64
	// MeridioSignals gives SIGUSR1 and SIGUSR2 Meridio's semantics; see [logs.NewMeridioSignals].
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
