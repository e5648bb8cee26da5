package publication

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/dynamic"
	coordinationclient "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/client-go/rest"

	"github.com/vipgate/vipgate/pkg/latest"
)

const (
	// writeTimeout bounds one write, and thus the stop.
	writeTimeout = 5 * time.Second
	// qps and burst limit writes of status: those of 500 Services follow a change within seconds.
	qps, burst = 50, 100
)

// Metrics counts what a publisher does. The methods are safe for concurrent use.
type Metrics interface {
	// PublicationWrite counts a write of a resource, such as services, by its result.
	PublicationWrite(resource, result string)
	// Leader sets whether this process is the leader.
	Leader(bool)
}

// Results of writes. A conflict means that the object was newer than the one looked at; such a
// write is tried again with the newer one. Refused are all other errors that an API server answers.
const (
	Written     = "written"
	Conflict    = "conflict"
	Forbidden   = "forbidden"
	Refused     = "refused"
	Unreachable = "unreachable"
)

func resultOf(err error) string {
	switch {
	case err == nil:
		return Written
	case apierrors.IsConflict(err):
		return Conflict
	case apierrors.IsForbidden(err):
		return Forbidden
	case answered(err):
		return Refused
	default:
		return Unreachable
	}
}

// Options of a publisher. All are required.
type Options struct {
	// Config reaches the API server.
	Config *rest.Config
	// Namespace and Trench name the Trench, Pod the Pod of this process in the same namespace.
	Namespace, Trench, Pod string
	// AdminSocket is that of the frontend in the same pod.
	AdminSocket string
	// Input is what to publish; nothing while it is zero.
	Input   *latest.Value[Input]
	Metrics Metrics
	Log     *slog.Logger
}

// State is what a publisher does, for the status of the process.
type State struct {
	// Leader is the identity of the leader as last seen, the name of its Pod; Leading reports whether
	// it is this process.
	Leader  string
	Leading bool
	// WriteError and ReportError are the last errors of writing status and the report; nil once it
	// succeeded.
	WriteError, ReportError error
}

// Publisher publishes until its context ends. It implements task.Task.
type Publisher struct {
	options      Options
	frontend     *frontend
	state        *latest.Value[State]
	watch, write dynamic.Interface
	leases       coordinationclient.LeasesGetter
	timing       timing
	lease        string
}

// New returns a publisher.
func New(o Options) (*Publisher, error) {
	writes := rest.CopyConfig(o.Config)
	writes.Timeout, writes.QPS = writeTimeout, -1 // the leader and its recorder limit themselves
	watches := rest.CopyConfig(o.Config)
	watches.Timeout = 0
	p := &Publisher{
		options:  o,
		frontend: newFrontend(o.AdminSocket, o.Log),
		state:    latest.New(State{}),
		timing:   defaultTiming(),
		lease:    LeaseName(o.Trench),
	}
	var err error
	if p.write, err = dynamic.NewForConfig(writes); err == nil {
		p.watch, err = dynamic.NewForConfig(watches)
	}
	if err == nil {
		p.leases, err = coordinationclient.NewForConfig(writes)
	}
	if err != nil {
		return nil, fmt.Errorf("failed to create a client of the API server %s: %w", o.Config.Host, err)
	}
	return p, nil
}

// String implements task.Task.
func (*Publisher) String() string { return "publication" }

// State returns the state, which changes with time.
func (p *Publisher) State() *latest.Value[State] { return p.state }

// Run publishes until ctx ends. It returns only ctx's error: what fails is retried.
func (p *Publisher) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return p.frontend.run(ctx) })
	g.Go(func() error { return p.annotate(ctx) })
	g.Go(func() error { return p.campaign(ctx) })
	return g.Wait()
}
