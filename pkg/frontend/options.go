package frontend

import (
	"errors"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"google.golang.org/grpc/credentials"

	"github.com/vipgate/vipgate/pkg/bird"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/kernel"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/logs"
	shell "github.com/vipgate/vipgate/pkg/process"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/readinessfile"
	"github.com/vipgate/vipgate/pkg/task"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/trench/change"
)

// ConfigSource supplies the configuration, such as a watcher of the trench file.
type ConfigSource interface {
	task.Task
	// Value returns the configuration in force.
	Value() *latest.Value[trench.Loaded]
	// Stale returns why the configuration may be outdated.
	Stale() *latest.Value[*trench.Stale]
	// Confirm puts held removals in force, if the identifier is theirs or "".
	Confirm(identifier string) (trench.Held, error)
}

// Options configures a frontend. Every field is required unless documented otherwise.
type Options struct {
	shell.Settings
	// Source supplies the configuration. SourceName names it in status and events, and
	// StaleCondition is the health service that shows whether Source is current.
	Source                     ConfigSource
	SourceName, StaleCondition string

	// Directory selects a directory of readiness files as the readiness source, unless it is nil.
	// Unused without gating.
	Directory *readinessfile.Options
	// LBSocket is the load balancer's readiness socket. Unused without gating and with Directory.
	LBSocket string
	// Fallback reads a load balancer without ReadinessService; nil if each load balancer must have it.
	Fallback readiness.Fallback
	// Identity is the frontend's SVID; nil if none is needed. Credentials authorize the load balancer.
	Identity      *identity.Source
	Credentials   credentials.TransportCredentials
	LoadBalancers []spiffeid.ID // IDs that may be the load balancer; used for a warning
	// Gate configures the drain time and the gating of advertisements by readiness.
	Gate       gate.Options
	MaxBackoff time.Duration // between attempts to reach the load balancer

	// External selects a speaker that another program runs, instead of BIRD; nil for BIRD.
	External *ExternalSpeaker
	// BIRD and Kernel lack the interface, the log and the password, which Run adds.
	BIRD   bird.Options
	Kernel kernel.Options

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

	// Tasks run until every VIP is withdrawn, besides the frontend's own, and Collectors add metrics.
	Tasks      []task.Task
	Collectors []prometheus.Collector
	// InForce and Connected, unless nil, are kept at the VIPs in force, and whether a gateway is up.
	InForce   *latest.Value[*change.InForce]
	Connected *latest.Value[bool]
	// Started, unless nil, is called once, when every ready VIP is advertised or ReadyTimeout
	// expired. It must not block.
	Started func()
	// Signals replaces [logs.NewSignals], unless nil.
	Signals *logs.Signals
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
