package cli

import (
	"context"
	"net/netip"
	"time"

	targetv1 "github.com/vipgate/vipgate/pkg/api/target/v1"
	"github.com/vipgate/vipgate/pkg/vip"
)

// DefaultTargetID is the SPIFFE ID of a target with the development authority.
const DefaultTargetID = "spiffe://vipgate.local/target"

// DefaultProbeID is the SPIFFE ID of a probe with the development authority.
const DefaultProbeID = "spiffe://vipgate.local/probe"

// TargetFlags is the group of flags that describe a target that registers itself.
type TargetFlags struct {
	Name   string         `arg:"" help:"Name of the target, unique in the stream."`
	Stream string         `required:"" help:"Stream of the target." placeholder:"STREAM"`
	IP     []netip.Addr   `name:"ip" required:"" help:"Address of the target; repeatable, one of each family." placeholder:"ADDR"`
	Grace  *time.Duration `help:"How long it outlives a lost connection; absent, and anything longer: --registry-grace of the lb." placeholder:"DURATION"`
}

// Request returns the registration request of the target.
func (f TargetFlags) Request() (*targetv1.RegisterRequest, error) {
	t := &targetv1.Target{Name: f.Name}
	for i, ip := range f.IP {
		for _, other := range f.IP[:i] {
			if vip.FamilyOf(ip) == vip.FamilyOf(other) {
				return nil, Usage("--ip=%s and --ip=%s are of one family: a target has one address of a family, register a "+
					"second target", other, ip)
			}
		}
		t.Addresses = append(t.Addresses, ip.String())
	}
	grace, err := NotNegative("--grace", f.Grace)
	if err != nil {
		return nil, err
	}
	return &targetv1.RegisterRequest{Stream: f.Stream, Targets: []*targetv1.Target{t}, Grace: grace}, nil
}

// RunUntilDrained calls run and returns its error. The first stop closes leave, so that run waits
// for the drain. The second stop cancels run's context.
func RunUntilDrained(ctx context.Context, out *Output, stops <-chan struct{},
	run func(ctx context.Context, leave <-chan struct{}) error,
) error {
	// run has its own context: the first stop must not cancel the calls of the drain.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	leave, ended := make(chan struct{}), make(chan error, 1)
	go func() { ended <- run(ctx, leave) }()
	select {
	case err := <-ended:
		return err
	case <-stops:
		close(leave)
	}
	select {
	case err := <-ended:
		return err
	case <-stops:
		out.Printf("ending at once; the target continues to drain\n")
		cancel()
	}
	return <-ended
}
