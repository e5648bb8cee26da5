package main

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/pkg/bird"
	"github.com/vipgate/vipgate/pkg/frontend"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/kernel"
	"github.com/vipgate/vipgate/pkg/trench"
)

// defaultID is the SPIFFE ID of a frontend with the development authority.
const defaultID = "spiffe://vipgate.local/frontend"

// trenchFlags are the flags that say what the trench file means.
type trenchFlags struct {
	TrenchFile    string        `help:"The trench file." default:"/etc/vipgate/trench/trench.yaml" type:"path" placeholder:"FILE"`
	LocalAS       uint32        `name:"local-as" help:"AS number of gateways' sessions on our side, where the trench file names none." default:"8103" placeholder:"AS" group:"BGP"`
	RemoteAS      uint32        `name:"remote-as" help:"AS number of gateways, where the trench file names none." default:"4248829953" placeholder:"AS" group:"BGP"`
	BGPLocalPort  uint16        `name:"bgp-local-port" help:"Our BGP port, where the trench file names none." default:"10179" placeholder:"PORT" group:"BGP"`
	BGPRemotePort uint16        `name:"bgp-remote-port" help:"Gateways' BGP port, where the trench file names none." default:"10179" placeholder:"PORT" group:"BGP"`
	BGPHoldTime   time.Duration `name:"bgp-hold-time" help:"Hold time, where the trench file names none." default:"3s" group:"BGP"`
}

// kernelFlags are the flags of the source routing.
type kernelFlags struct {
	TableID      uint32   `name:"table-id" help:"Routing table of the gateways' routes; the next one is ours too." default:"4096" placeholder:"N" group:"Kernel"`
	RulePriority int      `help:"Priority of our first rule; the next one is ours too." default:"100" placeholder:"N" group:"Kernel"`
	Mark         markFlag `help:"Mark, and its mask, of packets from a VIP." default:"0x01000000/0xff000000" placeholder:"MARK/MASK" group:"Kernel"`
	ECMP         bool     `name:"ecmp" help:"Spread VIP traffic over all gateways." negatable:"" group:"Kernel"`
}

func (f *kernelFlags) kernelOptions() kernel.Options {
	return kernel.Options{TableID: f.TableID, Priority: f.RulePriority, Mark: f.Mark.Mark, Mask: f.Mark.Mask}
}

// birdFlags are the flags of BIRD.
type birdFlags struct {
	ExternalInterface  string        `help:"Interface toward the gateways." default:"ext-vlan" placeholder:"NAME" group:"BGP"`
	RouterID           routerIDFlag  `name:"router-id" help:"BGP router id; derived from the pod or machine when absent." placeholder:"ADDR" group:"BGP"`
	BirdDir            string        `help:"Directory of BIRD's configuration." default:"/etc/bird" type:"path" placeholder:"DIR" group:"BIRD"`
	BirdSocket         string        `help:"BIRD's control socket." default:"/var/run/bird/bird.ctl" type:"path" placeholder:"SOCKET" group:"BIRD"`
	BirdExecutable     string        `help:"BIRD; looked up when absent." placeholder:"PATH" group:"BIRD"`
	LBBGPPort          uint16        `name:"lb-bgp-port" help:"Port of BIRD's session with us on 127.0.0.1." default:"1790" placeholder:"PORT" group:"BIRD"`
	BirdKernelScanTime time.Duration `help:"How often BIRD reads the kernel's routes." default:"10s" group:"BIRD"`
	BirdLogFileSize    int           `help:"Size in bytes of a log file of BIRD's own; 0 writes none." default:"0" placeholder:"BYTES" group:"BIRD"`
	LogBird            bool          `help:"Log BIRD's own lines at level info instead of debug." negatable:"" group:"BIRD"`
	DropIfNoPeer       bool          `help:"Drop VIP traffic while no gateway is up; always so, kept for Meridio's deployments." default:"true" negatable:"" group:"BIRD"`
}

// runFlags are the flags of `frontend run` and `frontend validate`.
type runFlags struct {
	trenchFlags
	LBSocket string `name:"lb-socket" help:"The load balancer's readiness socket." default:"unix:///var/lib/meridio/lb.sock" placeholder:"SOCKET"`
	readinessFlags
	LBID          []cli.SPIFFEID  `name:"lb-id" help:"SPIFFE ID of the load balancer; repeatable." placeholder:"ID" group:"Identity"`
	LBTrustDomain cli.TrustDomain `name:"lb-trust-domain" help:"Believe every member of this trust domain to be the load balancer: the widest setting." placeholder:"TD" group:"Identity"`
	cli.Identity

	Gating            string        `help:"on: advertise a VIP only while the load balancer says that it is ready; off: ignore the load balancer." enum:"on,off" default:"on"`
	OnLBLoss          string        `name:"on-lb-loss" help:"What happens to VIPs when the load balancer is lost: withdraw or keep." enum:"withdraw,keep" default:"withdraw"`
	FlapBackoff       string        `help:"on: a VIP that flaps waits before it rises again." enum:"on,off" default:"on"`
	MaxBackoff        time.Duration `help:"Longest wait between attempts to reach the load balancer." default:"2s"`
	DrainTime         time.Duration `help:"How long VIPs are de-preferred before they are withdrawn." default:"1s"`
	Settle            time.Duration `help:"How long gateways get to change their forwarding tables after a withdrawal." default:"200ms"`
	ReadyTimeout      time.Duration `help:"How long Readiness waits after a start for VIPs that are ready and not advertised yet." default:"30s"`
	RequireRoute      bool          `help:"Withdraw the VIPs of a family while no gateway gives it a route back to clients." negatable:""`
	RemoveRulesOnExit bool          `help:"Remove marks, rules and blackhole at the end." group:"Kernel"`

	birdFlags
	kernelFlags

	AdminSocket    string `help:"Unix socket for status, grpcurl and pprof." default:"${admin_socket}" placeholder:"SOCKET" group:"Listeners"`
	HealthPort     uint16 `help:"Port of the gRPC health service." default:"7780" placeholder:"PORT" group:"Listeners"`
	MetricsPort    uint16 `help:"Port of the Prometheus metrics; 0 serves none." default:"2224" placeholder:"PORT" group:"Listeners"`
	MetricsEnabled bool   `help:"Serve metrics." default:"true" negatable:"" group:"Listeners"`
	cli.Listeners
	cli.Log
}

type runCommand struct{ runFlags }

type validateCommand struct{ runFlags }

// Run runs the frontend.
func (c *runCommand) Run(ctx context.Context, globals *cli.Globals) error {
	log, level, _ := c.Logger(globals.Debug) // check refuses the level
	o, err := c.options(log, true)
	if err != nil {
		return err
	}
	if err := c.checkInterface(); err != nil {
		return err
	}
	release, err := identity.OwnNetNS(ctx, "frontend", "admin socket "+c.AdminSocket)
	if err != nil {
		return err
	}
	defer release()
	o.Version, o.Level = cli.Version(), level
	return cli.RunUntilStopped(c.DrainTime+c.Settle, func(stops <-chan struct{}) error { return frontend.Run(ctx, o, stops) })
}

// Run checks what `frontend run` would check.
func (c *validateCommand) Run(_ *cli.Globals, out *cli.Output) error {
	if _, err := c.options(slog.New(slog.DiscardHandler), false); err != nil {
		return err
	}
	if err := c.checkInterface(); err != nil {
		fmt.Fprintf(os.Stderr, "frontend: warning: %v\n", err)
	}
	out.Printf("%s: valid\n", c.TrenchFile)
	return nil
}

func (c *trenchFlags) defaults() trench.Defaults {
	return trench.Defaults{
		LocalASN: c.LocalAS, RemoteASN: c.RemoteAS, LocalPort: c.BGPLocalPort, RemotePort: c.BGPRemotePort, HoldTime: c.BGPHoldTime,
	}
}

// read reads the trench file. With lenient a refused one is no error but nil: it is
// repaired while the frontend runs, and until then the watcher reports it.
func (c *trenchFlags) read(lenient bool) (*trench.Config, error) {
	if err := c.defaults().Validate(); err != nil {
		return nil, usage("--local-as, --remote-as, --bgp-local-port, --bgp-remote-port, --bgp-hold-time: %w", err)
	}
	config, err := trench.Read(c.TrenchFile, c.defaults())
	if err != nil && !lenient {
		return nil, usage("trench file refused:\n%w", err)
	}
	return config, nil
}

func (c *runFlags) options(log *slog.Logger, lenient bool) (frontend.Options, error) {
	var refused cli.Refusals
	config, err := c.read(lenient)
	refused.Add(err)
	c.check(&refused, config)
	if c.Gating == "on" && !c.ReadinessDir.Given {
		refused.Add(c.Identity.Check(defaultID, lenient))
	}
	if err := refused.Err(); err != nil {
		return frontend.Options{}, err
	}
	o := frontend.Options{
		TrenchFile: c.TrenchFile, Defaults: c.defaults(), Config: config,
		LBSocket: c.LBSocket, Gating: c.Gating == "on", FlapBackoff: c.FlapBackoff == "on", MaxBackoff: c.MaxBackoff,
		ExternalInterface: c.ExternalInterface,
		BIRD: bird.Options{
			Executable: c.BirdExecutable, Dir: c.BirdDir, Socket: c.BirdSocket, LoopbackPort: c.LBBGPPort,
			RouterID: c.RouterID.Addr, TableID: c.TableID, ECMP: c.ECMP, KernelScanTime: c.BirdKernelScanTime,
			LogFileSize: c.BirdLogFileSize, LogBIRD: c.LogBird,
		},
		Kernel:      c.kernelOptions(),
		AdminSocket: c.AdminSocket, HealthAddr: cli.Address(c.HealthHost, c.HealthPort),
		DrainTime: c.DrainTime, Settle: c.Settle, ReadyTimeout: c.ReadyTimeout, RequireRoute: c.RequireRoute, RemoveRulesOnExit: c.RemoveRulesOnExit, Log: log,
	}
	if c.OnLBLoss == "keep" {
		o.OnLBLoss = gate.KeepOnLoss
	}
	if c.MetricsPort != 0 && c.MetricsEnabled {
		o.MetricsAddr = cli.Address(c.MetricsHost, c.MetricsPort)
	}
	if o.Gating && c.ReadinessDir.Given {
		o.Directory = c.directory(c.DrainTime, log)
		return o, nil
	}
	if !o.Gating {
		return o, nil
	}
	if o.Identity, err = c.Identity.Source(defaultID, log); err != nil {
		return frontend.Options{}, usage("%w", err)
	}
	authorize := identity.Authorize(cli.IDs(c.LBID)...)
	if !c.LBTrustDomain.IsZero() {
		authorize = identity.AuthorizeMember(c.LBTrustDomain.TrustDomain, cli.IDs(c.LBID)...)
	}

	o.LoadBalancers = cli.IDs(c.LBID)
	o.Credentials = identity.ClientCredentials(o.Identity, identity.CredentialOptions{Authorize: authorize, Log: log})
	return o, nil
}

// check refuses what would only fail later. config is nil if it was refused.
func (c *runFlags) check(r *cli.Refusals, config *trench.Config) {
	_, _, err := c.Logger(false)
	r.Add(err)
	switch {
	case c.Gating != "on":
	case c.ReadinessDir.Given:
		c.checkDirectory(r)
	case c.LBSocket == "":
		r.Add(fmt.Errorf("--lb-socket: %w", frontend.ErrNoSocket))
	default:
		r.Socket("--lb-socket", c.LBSocket)
		r.If(len(c.LBID) == 0 && c.LBTrustDomain.IsZero(), "--lb-id is required: no SPIFFE ID is authorized")
	}
	r.Socket("--admin-socket", c.AdminSocket)
	r.Socket("--bird-socket", c.BirdSocket)
	r.If(c.HealthPort == 0, "--health-port=0: probes need a port that they know, 1 to 65535")
	r.If(c.LBBGPPort == 0, "--lb-bgp-port=0: a port lies between 1 and 65535, such as 1790")
	r.Ports(cli.Port{Flag: "--health-port", Port: c.HealthPort}, cli.Port{Flag: "--metrics-port", Port: c.MetricsPort}, cli.Port{Flag: "--lb-bgp-port", Port: c.LBBGPPort})
	r.If(len(c.ExternalInterface) > maxInterfaceName, "--external-interface=%s: the kernel's names have at most %d bytes", c.ExternalInterface, maxInterfaceName)
	if _, err := exec.LookPath(bird.Executable(c.BirdExecutable)); err != nil {
		r.Add(fmt.Errorf("--bird-executable=%s: %w: install BIRD, or name its path", bird.Executable(c.BirdExecutable), err))
	}
	if config != nil {
		for _, g := range config.Attractor.Gateways {
			r.If(g.LocalPort == c.LBBGPPort, "gateway %s uses local port %d, which is --lb-bgp-port's: choose another --lb-bgp-port", g.Name, g.LocalPort)
		}
	}
	r.Within("--drain-time", c.DrainTime, 0, cli.MaxDrainTime)
	r.Within("--settle", c.Settle, 0, cli.MaxSettle)
	r.Within("--ready-timeout", c.ReadyTimeout, 0, cli.MaxReadyTimeout)
	r.Within("--max-backoff", c.MaxBackoff, 0, cli.MaxMaxBackoff)
	r.Within("--bird-kernel-scan-time", c.BirdKernelScanTime, cli.MinScanTime, cli.MaxScanTime)
	// The kernel package takes 0 for its default, BIRD for the main table.
	r.If(c.TableID == 0 || c.RulePriority == 0, "--table-id and --rule-priority must not be 0: leave them out for 4096 and 100")
	if err := c.kernelOptions().Validate(); err != nil {
		r.Add(fmt.Errorf("--table-id, --rule-priority, --mark: %w", err))
	}
	if lb, forwards := cli.OfLB(); forwards {
		r.Overlap(cli.FrontendNumbers(c.TableID, c.RulePriority, c.Mark.Mask), lb,
			"--table-id", "--rule-priority", fmt.Sprintf("--mark=%#x/%#x", c.Mark.Mark, c.Mark.Mask), "the data plane of lb")
	}
}

// maxInterfaceName is IFNAMSIZ without the zero byte.
const maxInterfaceName = 15

// checkInterface refuses an interface that does not exist here.
func (c *runFlags) checkInterface() error {
	if _, err := net.InterfaceByName(c.ExternalInterface); err != nil {
		return usage("--external-interface=%s: there is no such interface in this network namespace (%w)", c.ExternalInterface, err)
	}
	return nil
}

// markFlag is a mark with its mask.
type markFlag struct{ Mark, Mask uint32 }

// UnmarshalText implements encoding.TextUnmarshaler.
func (m *markFlag) UnmarshalText(text []byte) error {
	mark, mask, _ := strings.Cut(string(text), "/")
	a, errA := strconv.ParseUint(mark, 0, 32)
	b, errB := strconv.ParseUint(mask, 0, 32)
	if errA != nil || errB != nil {
		return fmt.Errorf("%q is not a mark with a mask such as 0x01000000/0xff000000", text)
	}
	*m = markFlag{uint32(a), uint32(b)}
	return nil
}

// routerIDFlag is a BGP router id.
type routerIDFlag struct{ netip.Addr }

// UnmarshalText implements encoding.TextUnmarshaler.
func (r *routerIDFlag) UnmarshalText(text []byte) error {
	a, err := netip.ParseAddr(string(text))
	if err != nil || !a.Is4() || a.IsUnspecified() {
		return fmt.Errorf("%q is not a router id: write it like an IPv4 address other than 0.0.0.0", text)
	}
	r.Addr = a
	return nil
}
