package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	lbv1 "github.com/vipgate/vipgate/pkg/api/lb/v1"
	"github.com/vipgate/vipgate/pkg/dataplane"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/localaddress"
	"github.com/vipgate/vipgate/pkg/status"
)

// numberFlags set the fwmarks, tables and rule priorities of the data plane.
type numberFlags struct {
	FirstTable        uint32 `help:"First number that a target gets as its firewall mark and its routing table." default:"5000" placeholder:"N" group:"Data plane"`
	MarkMask          uint32 `help:"Bits of packet and connection marks that are the data plane's, from the lowest on; none of those of the frontend's --mark." default:"0x00ffffff" placeholder:"MASK" group:"Data plane"`
	DataplanePriority int    `help:"Priority of the first policy rule; vipgate uses the next two, too." default:"90" placeholder:"N" group:"Data plane"`
}

type dataPlaneFlags struct {
	Dataplane    string              `help:"nftables: forward the packets of VIPs to targets, in the kernel; fastpath: the same with a tcx program in front, where the kernel allows it, for --conntrack=off; fastpath-required: end if it does not; none: another process forwards." enum:"nftables,fastpath,fastpath-required,none" default:"none" group:"Data plane"`
	VIPInterface string              `name:"vip-interface" help:"Interface, such as lo, on which VIPs are addresses while this host serves them; with --dataplane=none. None when absent." placeholder:"NAME" group:"Data plane"`
	Conntrack    dataplane.Conntrack `help:"on: an established flow stays with its target while that lives, if replies come back through the same pod; loose: the same for replies through any pod; off: a flow moves when its entry in the table does." enum:"on,off,loose" default:"on" group:"Data plane"`
	numberFlags
}

// dataPlaneGrace is how long the frontend continues to advertise without the lb
// when the kernel forwards packets: enough time for a restart.
const dataPlaneGrace = 5 * time.Second

const (
	// minTable excludes the tables that the kernel reserves (253 to 255) and the numbers
	// for which ip-route(8) has names.
	minTable = 256
	// maxPriority leaves room for two more rules before the kernel's rule for the main table, 32766.
	maxPriority = 32766 - 3
	// minNumbers is the minimum number of targets that the mask must allow.
	minNumbers = 1000
)

// check refuses invalid values; highest is the highest number of a target.
func (f *numberFlags) check(r *cli.Refusals, highest uint32) {
	mask := f.MarkMask
	// A fwmark is also the number of a routing table, so its bits are the lowest ones.
	r.If(mask == 0 || mask&(mask+1) != 0, "--mark-mask=%#x: write ones from the lowest bit on, such as %#08x",
		mask, dataplane.DefaultMask)
	r.If(f.FirstTable < minTable, "--first-table=%d: at least %d, since the kernel has tables of its own below",
		f.FirstTable, minTable)
	r.If(f.FirstTable > highest || highest-f.FirstTable < minNumbers, "--first-table=%d with --mark-mask=%#x leaves "+
		"less than %d numbers up to %d: take a wider mask, or a lower number", f.FirstTable, mask, minNumbers, highest)
	r.If(f.DataplanePriority < 1 || f.DataplanePriority > maxPriority,
		"--dataplane-priority=%d: 1 to %d, before the kernel's rule for the main table", f.DataplanePriority, maxPriority)
}

func (f *numberFlags) options() dataplane.Options {
	return dataplane.Options{
		Config: dataplane.Config{First: f.FirstTable, Mask: f.MarkMask, Priority: f.DataplanePriority},
	}
}

func (f *dataPlaneFlags) on() bool { return f.Dataplane != "none" }

// fastPaths maps the values of --dataplane to the fast path.
var fastPaths = map[string]dataplane.FastPath{
	"fastpath": dataplane.FastPathAuto, "fastpath-required": dataplane.FastPathRequired,
}

// options returns nil without a data plane.
func (f *dataPlaneFlags) options() *dataplane.Options {
	if !f.on() {
		return nil
	}
	o := f.numberFlags.options()
	o.Conntrack, o.FastPath = f.Conntrack, fastPaths[f.Dataplane]
	return &o
}

func (f *dataPlaneFlags) check(r *cli.Refusals) {
	f.numberFlags.check(r, dataplane.Config{Mask: f.MarkMask, Conntrack: f.Conntrack}.FWMarkMask())
	r.If(f.Conntrack == dataplane.ConntrackLoose && f.MarkMask > math.MaxInt32,
		"--mark-mask=%#x: --conntrack=loose needs the highest bit itself", f.MarkMask)
	r.If(fastPaths[f.Dataplane] == dataplane.FastPathRequired && f.Conntrack != dataplane.ConntrackOff,
		"--dataplane=fastpath-required needs --conntrack=off: the fast path remembers no flows")
	r.If(f.on() && f.VIPInterface != "", "--vip-interface=%s needs --dataplane=none: the kernel would deliver the "+
		"packets of VIPs to this host, not to targets", f.VIPInterface)
	if f.on() {
		// lb and frontend share the network namespace of the pod.
		r.OverlapFrontend(cli.LBNumbers(f.FirstTable, f.MarkMask, f.DataplanePriority))
	}
}

// refuse returns an error for requirements of the data plane that the kernel lacks, with remedies.
func refuse(problems []dataplane.Problem) error {
	if len(problems) == 0 {
		return nil
	}
	var b strings.Builder
	b.WriteString("the data plane cannot work here:")
	for _, p := range problems {
		fmt.Fprintf(&b, "\n  %s: %s", p.Object, p.Detail)
		if p.Remedy != "" {
			fmt.Fprintf(&b, "\n    remedy: %s", p.Remedy)
		}
	}
	return cli.Usage("%s", b.String())
}

type reconcileCommand struct{ cli.AdminFlags }

// reconcileTimeout is a little longer than the limit of the running process.
const reconcileTimeout = 35 * time.Second

func (c *reconcileCommand) Run(ctx context.Context, out *cli.Output) error {
	return repair(ctx, out, func(ctx context.Context) ([]*lbv1.DataPlaneDrift, error) {
		r, err := call(ctx, c.AdminFlags, client.Reconcile, &lbv1.ReconcileRequest{})
		return r.GetRepaired(), err
	})
}

type resumeCommand struct {
	cli.AdminFlags
	Stream string `help:"Only this stream; without it all holds end." placeholder:"NAME"`
}

func (c *resumeCommand) Run(ctx context.Context, out *cli.Output) error {
	return repair(ctx, out, func(ctx context.Context) ([]*lbv1.DataPlaneDrift, error) {
		r, err := call(ctx, c.AdminFlags, client.Resume, &lbv1.ResumeRequest{Stream: c.Stream})
		return r.GetRepaired(), err
	})
}

// repair makes a call and prints the repaired drift.
func repair(ctx context.Context, out *cli.Output, call func(context.Context) ([]*lbv1.DataPlaneDrift, error)) error {
	ctx, cancel := context.WithTimeout(ctx, reconcileTimeout)
	defer cancel()
	repaired, err := call(ctx)
	if err != nil {
		return err
	}
	for _, d := range repaired {
		out.Printf("repaired: %s\n", status.Drift(d))
	}
	if len(repaired) == 0 {
		out.Printf("nothing to repair\n")
	}
	return nil
}

type holdCommand struct {
	cli.AdminFlags
	Stream string         `help:"Only this stream; without it all streams and the common table." placeholder:"NAME"`
	For    *time.Duration `help:"End the hold after this time; without it only lb resume does." placeholder:"DURATION"`
}

func (c *holdCommand) Run(ctx context.Context, out *cli.Output) error {
	r := &lbv1.HoldRequest{Stream: c.Stream}
	if c.For != nil {
		// The process would refuse it, too; this error names the flag.
		if *c.For <= 0 {
			return cli.Usage("--for=%v: it must be positive", *c.For)
		}
		r.Duration = durationpb.New(*c.For)
	}
	answer, err := call(ctx, c.AdminFlags, client.Hold, r)
	if err != nil {
		return err
	}
	end := "until lb resume"
	if until := answer.GetUntil(); until != nil {
		end = "until " + until.AsTime().Format(time.RFC3339)
	}
	out.Printf("held %s\n", end)
	return nil
}

type cleanupCommand struct{ numberFlags }

// cleanupTimeout bounds the removal of some ten thousand objects.
const cleanupTimeout = time.Minute

func (c *cleanupCommand) Run(ctx context.Context, out *cli.Output) error {
	var refused cli.Refusals
	c.numberFlags.check(&refused, c.MarkMask)
	if err := refused.Err(); err != nil {
		return err
	}
	// A running lb would restore the removed objects.
	release, err := identity.OwnNetNS(ctx, "lb", "lb cleanup", identity.NetNSFallback{})
	if err != nil {
		return err
	}
	defer release()
	ctx, cancel := context.WithTimeout(ctx, cleanupTimeout)
	defer cancel()
	removed, err := dataplane.Cleanup(ctx, c.options())
	addresses, errLocal := localaddress.Cleanup()
	removed, err = append(removed, addresses...), errors.Join(err, errLocal)
	// After an error, the list has the objects that were removed before it.
	for _, line := range removed {
		out.Printf("removed: %s\n", line)
	}
	if err != nil {
		return fmt.Errorf("remove the data plane: %w", err)
	}
	if len(removed) == 0 {
		out.Printf("nothing to remove\n")
	}
	return nil
}
