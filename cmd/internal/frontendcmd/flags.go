package frontendcmd

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/alecthomas/kong"
	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/spiffetls/tlsconfig"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/pkg/announce"
	"github.com/vipgate/vipgate/pkg/bird"
	"github.com/vipgate/vipgate/pkg/frontend"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/kernel"
	"github.com/vipgate/vipgate/pkg/process"
)

// DefaultID is the SPIFFE ID of a frontend with the development authority.
const DefaultID = "spiffe://vipgate.local/frontend"

// maxHoldTime is the longest hold time of the session with BIRD.
const maxHoldTime = 5 * time.Minute

// KernelFlags are the flags of source routing.
type KernelFlags struct {
	TableID      uint32 `name:"table-id" help:"Routing table of the gateways' routes; vipgate uses the next one, too." default:"4096" placeholder:"N" group:"Kernel"`
	RulePriority int    `help:"Priority of the first rule; vipgate uses the next one, too." default:"100" placeholder:"N" group:"Kernel"`
	Mark         mark   `help:"Mark, and its mask, of packets from a VIP." default:"0x01000000/0xff000000" placeholder:"MARK/MASK" group:"Kernel"`
	ECMP         bool   `name:"ecmp" help:"Spread VIP traffic over all gateways." negatable:"" group:"Kernel"`
}

// BirdFlags are the flags of BIRD.
type BirdFlags struct {
	RouterID       netip.Addr    `name:"router-id" help:"BGP router id; derived from the pod or machine when absent." placeholder:"ADDR" group:"BGP"`
	BirdDir        string        `help:"Directory of BIRD's configuration, and of what survives a restart: drains by an operator, the last good configuration." default:"/etc/bird" type:"path" placeholder:"DIR" group:"BIRD"`
	BirdSocket     string        `help:"BIRD's control socket." default:"/var/run/bird/bird.ctl" type:"path" placeholder:"SOCKET" group:"BIRD"`
	BirdExecutable string        `help:"BIRD; looked up when absent." placeholder:"PATH" group:"BIRD"`
	LBBGPPort      uint16        `name:"lb-bgp-port" help:"Port of BIRD's session with the frontend on 127.0.0.1." default:"1790" placeholder:"PORT" group:"BIRD"`
	LBBGPHoldTime  time.Duration `name:"lb-bgp-hold-time" help:"Hold time of this session, after which BIRD withdraws the VIPs of a frontend that hangs. BIRD may be silent for two thirds of it." default:"3s" group:"BIRD"`
	ImportRoutes   string        `help:"Routes that are taken from gateways: default, only default routes; all, every route except those of VIPs." enum:"default,all" default:"default" group:"BGP"`
	ImportLimit    uint32        `help:"Most routes that are taken from one gateway; further ones are ignored." default:"1000" placeholder:"N" group:"BGP"`
}

// Flags are the flags of a running frontend.
type Flags struct {
	LBSocket string `name:"lb-socket" help:"The load balancer's readiness socket." default:"unix:///var/lib/meridio/lb.sock" placeholder:"SOCKET"`
	readinessFlags
	LBID          []spiffeid.ID        `name:"lb-id" help:"SPIFFE ID of the load balancer; repeatable." placeholder:"ID" group:"Identity"`
	LBTrustDomain spiffeid.TrustDomain `name:"lb-trust-domain" help:"Authorize every member of this trust domain as the load balancer: the widest setting." placeholder:"TD" group:"Identity"`
	cli.CachedIdentity

	Gating            string        `help:"on: advertise a VIP only while the load balancer reports it as ready; off: ignore the load balancer." enum:"on,off" default:"on"`
	OnLBLoss          string        `name:"on-lb-loss" help:"What happens to VIPs when the load balancer is lost: withdraw or keep." enum:"withdraw,keep" default:"withdraw"`
	FlapBackoff       string        `help:"on: a VIP that flaps waits before it rises again." enum:"on,off" default:"on"`
	DrainTime         time.Duration `help:"How long VIPs are de-preferred before they are withdrawn." default:"1s"`
	Settle            time.Duration `help:"Time for gateways to change their forwarding tables after a withdrawal." default:"200ms"`
	ReadyTimeout      time.Duration `help:"How long Readiness waits after a start for VIPs that are ready and not advertised yet." default:"30s"`
	StaticVIPs        string        `name:"static-vips" help:"any: static gateways get traffic of a family while at least one of its VIPs is ready; all: while all of them are." enum:"any,all" default:"any"`
	RequireRoute      bool          `help:"Withdraw the VIPs of a family while no gateway gives it a route back to clients." negatable:""`
	RemoveRulesOnExit bool          `help:"Remove marks, rules and blackhole at the end." group:"Kernel"`

	BirdFlags
	KernelFlags
	cli.Process

	// Foreign reports whether another program runs the BGP speaker: the flags of BIRD are unused.
	Foreign bool `kong:"-"`

	// untilStopped replaces cli.RunUntilStopped in tests, unless nil.
	untilStopped func(drainTime time.Duration, run func(stops <-chan struct{}) error) error
}

// Program describes the command line of a frontend.
func Program() cli.Program {
	return cli.Program{
		Name: "frontend",
		Description: "Advertises the VIPs of a trench over BGP, each only while the load balancer can forward it and a " +
			"gateway session is up.",
		HealthPort: 7780, MetricsPort: 2224,
		Aliases: []cli.Alias{
			cli.Renamed("VIPGATE_READINESS_DIR", "MERIDIO_READINESS_DIR"), // of Meridio 2's router
			cli.Renamed("VIPGATE_ON_MISSING_DIRECTORY", "VIPGATE_ON_DIRECTORY_GONE"),
		},
		Options: []kong.Option{
			cli.Mapper("a mark with a mask such as 0x01000000/0xff000000", parseMark),
		},
	}
}

// options returns the numbers of source routing.
func (f *KernelFlags) options() kernel.Options {
	return kernel.Options{TableID: f.TableID, Priority: f.RulePriority, Mark: f.Mark.Mark, Mask: f.Mark.Mask}
}

// Options returns the options of BIRD, whose routes are in the table of routing.
func (f *BirdFlags) Options(routing *KernelFlags) bird.Options {
	return bird.Options{
		Executable: f.BirdExecutable, Dir: f.BirdDir, Socket: f.BirdSocket, LoopbackPort: f.LBBGPPort,
		LoopbackHoldTime: f.LBBGPHoldTime, RouterID: f.RouterID, TableID: routing.TableID, ECMP: routing.ECMP,
		ImportAll: f.ImportRoutes == "all", ImportLimit: f.ImportLimit,
	}
}

// UsesLB reports whether the load balancer's socket is the source of readiness.
func (f *Flags) UsesLB() bool { return f.Gating == "on" && f.ReadinessDir == nil }

// NamesLB reports whether the flags authorize a load balancer.
func (f *Flags) NamesLB() bool { return len(f.LBID) > 0 || !f.LBTrustDomain.IsZero() }

// Check refuses flags that would fail after the start.
func (f *Flags) Check(r *cli.Refusals) {
	// An empty socket or directory must not mean "no gating", which would advertise every VIP.
	switch {
	case f.Gating != "on":
	case f.ReadinessDir != nil:
		f.checkDirectory(r)
	case f.LBSocket == "":
		r.Add(fmt.Errorf("--lb-socket: %w", frontend.ErrNoSocket))
	default:
		r.Socket("--lb-socket", f.LBSocket)
	}
	f.Process.Check(r, cli.Port{Flag: "--lb-bgp-port", Port: f.LBBGPPort})
	if !f.Foreign {
		f.checkBIRD(r)
	}
	r.If(f.RouterID.IsValid() && (!f.RouterID.Is4() || f.RouterID.IsUnspecified()),
		"--router-id=%s: write it like an IPv4 address other than 0.0.0.0", f.RouterID)
	r.Within("--drain-time", f.DrainTime, 0, time.Hour)
	r.Within("--settle", f.Settle, 0, time.Minute)
	r.Within("--ready-timeout", f.ReadyTimeout, 0, time.Hour)
	// 0 means the default in the kernel package, but the main table in BIRD.
	r.If(f.TableID == 0 || f.RulePriority == 0,
		"--table-id and --rule-priority must not be 0: leave them out for 4096 and 100")
	err := f.KernelFlags.options().Validate()
	r.If(err != nil, "--table-id, --rule-priority, --mark: %w", err)
	// lb and frontend share the network namespace of the pod.
	r.OverlapLB(cli.FrontendNumbers(f.TableID, f.RulePriority, f.Mark.Mark, f.Mark.Mask))
}

// checkBIRD refuses flags with which BIRD would not start.
func (f *Flags) checkBIRD(r *cli.Refusals) {
	r.Socket("--bird-socket", f.BirdSocket)
	r.If(f.LBBGPPort == 0, "--lb-bgp-port=0: a port lies between 1 and 65535, such as 1790")
	hold, least := f.LBBGPHoldTime, announce.DefaultHoldTime
	r.If(hold == 0, "--lb-bgp-hold-time=0: the session would never expire, and VIPs of a frontend that hangs "+
		"stay advertised; use at least %v", least)
	r.If(hold > 0 && hold < least, "--lb-bgp-hold-time=%v: at least %v (RFC 4271)", hold, least)
	r.If(hold%time.Second != 0, "--lb-bgp-hold-time=%v: BGP has whole seconds", hold)
	r.Within("--lb-bgp-hold-time", hold, 0, maxHoldTime)
	// Without this check, the frontend would start and try BIRD again and again.
	executable := bird.Executable(f.BirdExecutable)
	_, err := exec.LookPath(executable)
	r.If(err != nil, "--bird-executable=%s: %w: install BIRD, or name its path", executable, err)
	r.If(f.ImportLimit == 0,
		"--import-limit=0: no gateway could give a route; leave it out for %d", bird.DefaultImportLimit)
}

// CheckInterface refuses an external interface, named by setting, that does not exist.
func CheckInterface(setting, name string) error {
	if _, err := net.InterfaceByName(name); err != nil {
		return cli.Usage("%s=%s: there is no such interface in this network namespace (%w)", setting, name, err)
	}
	return nil
}

// Options returns the options of a frontend without its configuration source. own is nil unless an
// SVID is needed, and authorize accepts the load balancer.
func (f *Flags) Options(own *identity.Source, authorize tlsconfig.Authorizer, s process.Settings) frontend.Options {
	o := frontend.Options{
		Settings: s, LBSocket: f.LBSocket, LoadBalancers: f.LBID, Identity: own,
		Gate: gate.Options{
			Ungated: f.Gating == "off", NoFlapBackoff: f.FlapBackoff == "off", DrainTime: f.DrainTime,
		},
		BIRD: f.BirdFlags.Options(&f.KernelFlags), Kernel: f.KernelFlags.options(),
		Settle: f.Settle, ReadyTimeout: f.ReadyTimeout, RequireRoute: f.RequireRoute,
		RemoveRulesOnExit: f.RemoveRulesOnExit, StaticAll: f.StaticVIPs == "all",
	}
	o.Gate.Silence = o.BIRD.Silence()
	if f.OnLBLoss == "keep" {
		o.Gate.OnLoss = gate.KeepOnLoss
	}
	// Without gating neither source of readiness is read.
	switch {
	case f.UsesLB():
		o.Credentials = identity.NewCredentials(own, identity.CredentialOptions{Authorize: authorize, Log: s.Log})
	case !o.Gate.Ungated:
		o.Directory = f.directory(f.DrainTime, s.Log)
	}
	return o
}

// RunUntilStopped starts a frontend and runs it until the process is stopped, as the only one in
// its network namespace. A stop ends the trial of the trench file, also during the start.
func (f *Flags) RunUntilStopped(ctx context.Context, start func() (frontend.Options, error)) error {
	untilStopped := cli.RunUntilStopped
	if f.untilStopped != nil {
		untilStopped = f.untilStopped
	}
	return untilStopped(f.DrainTime+f.Settle, func(stops <-chan struct{}) error {
		o, err := cli.Start(stops, start)
		if err != nil {
			return err
		}
		// Two frontends would remove each other's rules and marks.
		if !o.Kernel.Foreign {
			release, err := identity.OwnNetNS(ctx, "frontend", "admin socket "+f.AdminSocket,
				identity.NetNSFallback{AdminSocket: f.AdminSocket, Log: o.Log})
			if err != nil {
				return err
			}
			defer release()
		}
		cli.WarnOfTarget(ctx, o.Log)
		return frontend.Run(ctx, o, stops)
	})
}

type mark struct{ Mark, Mask uint32 }

func parseMark(text string) (mark, error) {
	first, second, _ := strings.Cut(text, "/")
	value, errValue := strconv.ParseUint(first, 0, 32)
	mask, errMask := strconv.ParseUint(second, 0, 32)
	return mark{uint32(value), uint32(mask)}, errors.Join(errValue, errMask)
}
