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

	"github.com/vipgate/vipgate/pkg/kube/cluster"
	"github.com/vipgate/vipgate/pkg/latest"
)

const (
	// writeTimeout is the timeout of a write, and bounds the time to stop.
	writeTimeout = 5 * time.Second
	// qps and burst limit status writes. After a change, 500 Services are written within seconds.
	qps, burst = 50, 100
)

// Metrics records the writes and the role of a publisher. The methods are safe for concurrent use.
type Metrics interface {
	// PublicationWrite counts a write of a resource, such as services, by its result.
	PublicationWrite(resource, result string)
	// Leader sets whether this process is the leader.
	Leader(bool)
}

// Results of writes. conflict means that the object changed after its evaluation; the write is
// retried with the newer object. rejected covers all remaining error answers of the API server.
const (
	written     = "written"
	conflict    = "conflict"
	forbidden   = "forbidden"
	rejected    = "refused"
	unreachable = "unreachable"
)

func resultOf(err error) string {
	switch {
	case err == nil:
		return written
	case apierrors.IsConflict(err):
		return conflict
	case apierrors.IsForbidden(err):
		return forbidden
	case answered(err):
		return rejected
	default:
		return unreachable
	}
}

// Options configure a publisher. All are required.
type Options struct {
	// Config configures the clients of the API server.
	Config *rest.Config
	// Namespace and Trench name the Trench, Pod the Pod of this process in the same namespace.
	Namespace, Trench, Pod string
	// AdminSocket is the path of the admin socket of the frontend in the same pod.
	AdminSocket string
	// Input is the state to publish, without reports. Nothing is published while it is zero.
	Input   *latest.Value[Input]
	Metrics Metrics
	Log     *slog.Logger
}

// State is the role and the errors of a publisher, for the status of the process.
type State struct {
	// Leader is the last observed identity of the leader, the name of its Pod. Leading reports
	// whether this process leads.
	Leader  string
	Leading bool
	// WriteError is the last error of a status write, ReportError of a report's; nil after success.
	WriteError, ReportError error
}

// Publisher publishes until its context ends. It implements task.Task.
type Publisher struct {
	options      Options
	frontend     *frontend
	state        *latest.Value[State]
	watch, write dynamic.Interface
	input        *latest.Value[Input] // options.Input with the reports
	reports      *cluster.Mirror
	reported     chan struct{} // has a token after a change of reports
	leases       coordinationclient.LeasesGetter
	timing       timing
	lease        string
}

// New returns a publisher.
func New(options Options) (*Publisher, error) {
	writes := rest.CopyConfig(options.Config)
	writes.Timeout, writes.QPS = writeTimeout, -1 // the leader and its recorder limit themselves
	watches := rest.CopyConfig(options.Config)
	// A timeout would also end watches.
	watches.Timeout = 0
	reported := make(chan struct{}, 1)
	publisher := &Publisher{
		options:  options,
		frontend: &frontend{options.AdminSocket, probeInterval, options.Log, latest.New(Report{})},
		state:    latest.New(State{}),
		input:    latest.New(Input{}),
		reports:  cluster.NewMirror(reported),
		reported: reported,
		timing:   defaultTiming(),
		lease:    LeaseName(options.Trench),
	}
	var err error
	if publisher.write, err = dynamic.NewForConfig(writes); err == nil {
		publisher.watch, err = dynamic.NewForConfig(watches)
	}
	if err == nil {
		publisher.leases, err = coordinationclient.NewForConfig(writes)
	}
	if err != nil {
		return nil, fmt.Errorf("failed to create a client of the API server %s: %w", options.Config.Host, err)
	}
	return publisher, nil
}

// String implements task.Task.
func (*Publisher) String() string { return "publication" }

// State returns the current state, and notifies of changes.
func (publisher *Publisher) State() *latest.Value[State] { return publisher.state }

// Input returns the state to publish, with the reports of the pods.
func (publisher *Publisher) Input() *latest.Value[Input] { return publisher.input }

// Leases returns the client of Leases, whose requests have a timeout.
func (publisher *Publisher) Leases() coordinationclient.LeasesGetter { return publisher.leases }

// Run publishes until ctx ends, and returns ctx's error. Failures are retried.
func (publisher *Publisher) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return publisher.frontend.run(ctx) })
	group.Go(func() error { return publisher.gather(ctx) })
	group.Go(func() error { return publisher.publishReport(ctx) })
	group.Go(func() error { return publisher.campaign(ctx) })
	return group.Wait()
}
