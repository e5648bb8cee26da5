package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/pkg/bird"
	"github.com/vipgate/vipgate/pkg/frontend"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/kernel"
	"github.com/vipgate/vipgate/pkg/logs"
	"github.com/vipgate/vipgate/pkg/trench"
)

// defaultID is the SPIFFE ID of a frontend with the development authority.
const defaultID = "spiffe://vipgate.local/frontend"

const defaultTrenchFile = "/etc/vipgate/trench/trench.yaml"

type trenchFlags struct {
	TrenchFile        string        `help:"The trench file." default:"${trench_file}" type:"path" placeholder:"FILE"`
	ExternalInterface string        `help:"Interface toward the gateways, where the trench file names none." default:"ext-vlan" placeholder:"NAME" group:"BGP"`
	LocalAS           uint32        `name:"local-as" help:"Local AS number of sessions with gateways, where the trench file names none." default:"8103" placeholder:"AS" group:"BGP"`
	RemoteAS          uint32        `name:"remote-as" help:"AS number of gateways, where the trench file names none." default:"4248829953" placeholder:"AS" group:"BGP"`
	BGPLocalPort      uint16        `name:"bgp-local-port" help:"Local BGP port, where the trench file names none." default:"10179" placeholder:"PORT" group:"BGP"`
	BGPRemotePort     uint16        `name:"bgp-remote-port" help:"Gateways' BGP port, where the trench file names none." default:"10179" placeholder:"PORT" group:"BGP"`
	BGPHoldTime       time.Duration `name:"bgp-hold-time" help:"Hold time, where the trench file names none." default:"3s" group:"BGP"`
}

type kernelFlags struct {
	TableID      uint32 `name:"table-id" help:"Routing table of the gateways' routes; vipgate uses the next one, too." default:"4096" placeholder:"N" group:"Kernel"`
	RulePriority int    `help:"Priority of the first rule; vipgate uses the next one, too." default:"100" placeholder:"N" group:"Kernel"`
	Mark         mark   `help:"Mark, and its mask, of packets from a VIP." default:"0x01000000/0xff000000" placeholder:"MARK/MASK" group:"Kernel"`
	ECMP         bool   `name:"ecmp" help:"Spread VIP traffic over all gateways." negatable:"" group:"Kernel"`
}

type birdFlags struct {
	RouterID           netip.Addr    `name:"router-id" help:"BGP router id; derived from the pod or machine when absent." placeholder:"ADDR" group:"BGP"`
	BirdDir            string        `help:"Directory of BIRD's configuration." default:"/etc/bird" type:"path" placeholder:"DIR" group:"BIRD"`
	BirdSocket         string        `help:"BIRD's control socket." default:"/var/run/bird/bird.ctl" type:"path" placeholder:"SOCKET" group:"BIRD"`
	BirdExecutable     string        `help:"BIRD; looked up when absent." placeholder:"PATH" group:"BIRD"`
	LBBGPPort          uint16        `name:"lb-bgp-port" help:"Port of BIRD's session with the frontend on 127.0.0.1." default:"1790" placeholder:"PORT" group:"BIRD"`
	BirdKernelScanTime time.Duration `help:"How often BIRD reads the kernel's routes." default:"10s" group:"BIRD"`
	BirdLogFile        string        `help:"BIRD's own log file; bird.log in --bird-dir when absent." type:"path" placeholder:"FILE" group:"BIRD"`
	BirdLogFileSize    int           `help:"Size in bytes of BIRD's own log file; 0 writes none." default:"0" placeholder:"BYTES" group:"BIRD"`
	LogBird            bool          `help:"Log BIRD's own lines at level info instead of debug." negatable:"" group:"BIRD"`
	ImportRoutes       string        `help:"Routes that are taken from gateways: default, only default routes; all, every route except those of VIPs." enum:"default,all" default:"default" group:"BGP"`
	ImportLimit        uint32        `help:"Most routes that are taken from one gateway; further ones are ignored." default:"1000" placeholder:"N" group:"BGP"`
	VRRP               []nextHop     `name:"vrrp" help:"Next hop of static default routes, such as a VRRP address, repeatable. With one, no route is taken from gateways." placeholder:"ADDR" group:"BGP"`
	DropIfNoPeer       bool          `help:"Drop VIP traffic while no gateway is up; always so, kept for Meridio's deployments." default:"true" negatable:"" group:"BIRD"`
}

type runFlags struct {
	trenchFlags
	nspFlags
	LBSocket string `name:"lb-socket" help:"The load balancer's readiness socket." default:"unix:///var/lib/meridio/lb.sock" placeholder:"SOCKET"`
	readinessFlags
	LBID          []spiffeid.ID        `name:"lb-id" help:"SPIFFE ID of the load balancer; repeatable." placeholder:"ID" group:"Identity"`
	LBTrustDomain spiffeid.TrustDomain `name:"lb-trust-domain" help:"Authorize every member of this trust domain as the load balancer: the widest setting." placeholder:"TD" group:"Identity"`
	cli.CachedIdentity

	Gating            string        `help:"on: advertise a VIP only while the load balancer reports it as ready; off: ignore the load balancer." enum:"on,off" default:"on"`
	OnLBLoss          string        `name:"on-lb-loss" help:"What happens to VIPs when the load balancer is lost: withdraw or keep." enum:"withdraw,keep" default:"withdraw"`
	FlapBackoff       string        `help:"on: a VIP that flaps waits before it rises again." enum:"on,off" default:"on"`
	MaxBackoff        time.Duration `help:"Longest wait between attempts to reach the load balancer." default:"2s"`
	DrainTime         time.Duration `help:"How long VIPs are de-preferred before they are withdrawn." default:"1s"`
	Settle            time.Duration `help:"Time for gateways to change their forwarding tables after a withdrawal." default:"200ms"`
	ReadyTimeout      time.Duration `help:"How long Readiness waits after a start for VIPs that are ready and not advertised yet." default:"30s"`
	StaticVIPs        string        `name:"static-vips" help:"any: static gateways get traffic of a family while at least one of its VIPs is ready; all: while all of them are." enum:"any,all" default:"any"`
	RequireRoute      bool          `help:"Withdraw the VIPs of a family while no gateway gives it a route back to clients." negatable:""`
	RemoveRulesOnExit bool          `help:"Remove marks, rules and blackhole at the end." group:"Kernel"`

	birdFlags
	kernelFlags

	MetricsEnabled bool   `help:"Serve metrics." default:"true" negatable:"" group:"Listeners"`
	HealthSocket   string `help:"Unix socket of a second gRPC health service, for exec probes of Meridio's pod; the service without a name has the state of Liveness there. None when absent." placeholder:"SOCKET" group:"Listeners"`
	cli.Listeners
	cli.Log
}

type runCommand struct {
	runFlags
	// untilStopped replaces cli.RunUntilStopped in tests, unless nil.
	untilStopped func(drainTime time.Duration, run func(stops <-chan struct{}) error) error
}

type validateCommand struct{ runFlags }

func (c *runCommand) Run(ctx context.Context, line *commandLine, stderr *logs.Writer) error {
	started := cli.CollectOften()
	warnIgnored(os.Environ(), stderr)
	log, level := c.Logger(line.Globals.Debug, stderr)
	o, err := c.options(log, true)
	if err != nil {
		return err
	}
	switch err := c.checkInterface(o.Config); {
	case err == nil:
	case o.NSP != nil:
		// In Meridio's pod another container may create the interface later. The frontend waits for it.
		log.Warn("external interface does not exist yet", "error", err)
	default:
		return err
	}
	release, err := identity.OwnNetNS(ctx, "frontend", "admin socket "+c.AdminSocket)
	if err != nil {
		return err
	}
	defer release()
	cli.WarnOfTarget(ctx, log)
	o.Version, o.Level, o.LostLines = cli.Version(), level, stderr.Lost
	o.Started, o.MeridioSignals = started, o.NSP != nil
	untilStopped := cli.RunUntilStopped
	if c.untilStopped != nil {
		untilStopped = c.untilStopped
	}
	return untilStopped(c.DrainTime+c.Settle,
		func(stops <-chan struct{}) error { return frontend.Run(ctx, o, stops) })
}

func (c *validateCommand) Run(out *cli.Output) error {
	warnIgnored(os.Environ(), os.Stderr)
	o, err := c.options(slog.New(slog.DiscardHandler), false)
	if err != nil {
		return err
	}
	if err := c.checkInterface(o.Config); err != nil {
		fmt.Fprintf(os.Stderr, "frontend: warning: %v\n", err)
	} else if o.Config != nil {
		// The interface is absent outside of the pod. If it exists, the preview finds gateways that
		// would have no session.
		_, problems, err := o.BIRD.Preview(o.Config.Attractor)
		if err != nil {
			return err
		}
		writeProblems("frontend: warning", o.Config.Attractor.Gateways, problems)
	}
	what := c.TrenchFile
	if o.NSP != nil {
		what = "flags (the NSP is not asked)"
	}
	out.Printf("%s: valid\n", what)
	return nil
}

func (c *kernelFlags) options() kernel.Options {
	return kernel.Options{TableID: c.TableID, Priority: c.RulePriority, Mark: c.Mark.Mark, Mask: c.Mark.Mask}
}

func (f *birdFlags) options(k *kernelFlags) bird.Options {
	return bird.Options{
		Executable: f.BirdExecutable, Dir: f.BirdDir, Socket: f.BirdSocket, LoopbackPort: f.LBBGPPort,
		RouterID: f.RouterID, TableID: k.TableID, ECMP: k.ECMP, VRRP: addresses(f.VRRP),
		KernelScanTime: f.BirdKernelScanTime, LogFile: f.BirdLogFile, LogFileSize: f.BirdLogFileSize, LogBIRD: f.LogBird,
		ImportAll: f.ImportRoutes == "all", ImportLimit: f.ImportLimit,
	}
}

func (c *trenchFlags) defaults() trench.Defaults {
	return trench.Defaults{
		Interface: c.ExternalInterface,
		LocalASN:  c.LocalAS, RemoteASN: c.RemoteAS, LocalPort: c.BGPLocalPort, RemotePort: c.BGPRemotePort,
		HoldTime: c.BGPHoldTime,
	}
}

func (c *trenchFlags) checkDefaults() error {
	if err := c.defaults().Validate(); err != nil {
		return cli.Usage("--external-interface, --local-as, --remote-as, --bgp-local-port, --bgp-remote-port, "+
			"--bgp-hold-time: %w", err)
	}
	return nil
}

// read reads the trench file. With lenient it returns nil without an error for a refused file. The
// watcher reports the refusal until the file is corrected.
func (c *trenchFlags) read(lenient bool) (*trench.Config, error) {
	if err := c.checkDefaults(); err != nil {
		return nil, err
	}
	config, err := trench.Read(c.TrenchFile, c.defaults())
	if err != nil && !lenient {
		return nil, cli.Usage("trench file refused:\n%w", err)
	}
	return config, nil
}

// readSource reads the trench file. It returns nil if the NSP is the source, whose configuration
// arrives later.
func (c *runFlags) readSource(useNSP, lenient bool) (*trench.Config, error) {
	if useNSP {
		return nil, c.checkDefaults()
	}
	return c.read(lenient)
}

func (c *runFlags) options(log *slog.Logger, lenient bool) (frontend.Options, error) {
	var refused cli.Refusals
	useNSP := c.useNSP()
	config, err := c.readSource(useNSP, lenient)
	refused.Add(err)
	c.check(&refused, config, useNSP)
	if useNSP || c.Gating == "on" && c.ReadinessDir == nil {
		refused.Add(c.CachedIdentity.Check(defaultID, lenient))
	}
	if err := refused.Err(); err != nil {
		return frontend.Options{}, err
	}
	o := frontend.Options{
		TrenchFile: c.TrenchFile, Defaults: c.defaults(), Config: config, LBSocket: c.LBSocket,
		Gate: gate.Options{
			Ungated: c.Gating == "off", NoFlapBackoff: c.FlapBackoff == "off", DrainTime: c.DrainTime,
		},
		MaxBackoff: c.MaxBackoff, BIRD: c.birdFlags.options(&c.kernelFlags), Kernel: c.kernelFlags.options(),
		AdminSocket: c.AdminSocket, HealthAddr: c.HealthAddress(), HealthSocket: c.HealthSocket, Settle: c.Settle,
		ReadyTimeout: c.ReadyTimeout, RequireRoute: c.RequireRoute, RemoveRulesOnExit: c.RemoveRulesOnExit, Log: log,
		StaticAll: c.StaticVIPs == "all",
	}
	if c.OnLBLoss == "keep" {
		o.Gate.OnLoss = gate.KeepOnLoss
	}
	if c.MetricsEnabled {
		o.MetricsAddr = c.MetricsAddress()
	}
	usesLB := !o.Gate.Ungated && c.ReadinessDir == nil
	if useNSP || usesLB {
		if o.Identity, err = c.CachedIdentity.Source(defaultID, log); err != nil {
			return frontend.Options{}, cli.Usage("%w", err)
		}
	}
	if useNSP {
		if o.NSP, err = c.nspOptions(o.Identity, log); err != nil {
			return frontend.Options{}, err
		}
		o.Secrets = c.secrets(log)
		o.NSP.Keys, o.BIRD.ExplainPassword = o.Secrets, o.Secrets.Explain
	}
	switch {
	case usesLB:
		o.LoadBalancers = c.LBID
		o.Credentials = identity.NewCredentials(o.Identity, identity.CredentialOptions{
			Authorize: c.authorizeLB(o.Identity, useNSP, log), Log: log,
		})
	case !o.Gate.Ungated:
		o.Directory = c.directory(c.DrainTime, log)
	}
	return o, nil
}

type renderCommand struct {
	trenchFlags
	birdFlags
	kernelFlags
}

// Run prints BIRD's configuration for the current trench file and interfaces.
func (c *renderCommand) Run(out *cli.Output) error {
	config, err := c.read(false)
	if err != nil {
		return err
	}
	o := c.birdFlags.options(&c.kernelFlags)
	o.Password = "generated at each start"
	content, problems, err := o.Preview(config.Attractor)
	if err != nil {
		return err
	}
	writeProblems("frontend", config.Attractor.Gateways, problems)
	out.Printf("%s", content)
	return nil
}

// writeProblems prints why gateways would have no session in the current network namespace.
func writeProblems(prefix string, gateways []trench.Gateway, problems map[string]string) {
	for _, g := range gateways {
		if problem := problems[g.Name]; problem != "" {
			fmt.Fprintf(os.Stderr, "%s: gateway %s has no session: %s\n", prefix, g.Name, problem)
		}
	}
}

// check refuses flags that would fail after the start. config is nil if the trench file was
// refused or if the NSP is the source.
func (c *runFlags) check(r *cli.Refusals, config *trench.Config, useNSP bool) {
	c.Log.Check(r)
	if useNSP {
		c.checkNSP(r)
	}
	switch {
	case c.Gating != "on":
	case c.ReadinessDir != nil:
		c.checkDirectory(r)
	case c.LBSocket == "":
		r.Add(fmt.Errorf("--lb-socket: %w", frontend.ErrNoSocket))
	default:
		r.Socket("--lb-socket", c.LBSocket)
		r.If(!c.namesLB() && !useNSP, "--lb-id is required: no SPIFFE ID is authorized")
	}
	c.Listeners.Check(r, cli.Port{Flag: "--lb-bgp-port", Port: c.LBBGPPort})
	r.Socket("--bird-socket", c.BirdSocket)
	if c.HealthSocket != "" {
		r.Socket("--health-socket", c.HealthSocket)
	}
	r.If(c.LBBGPPort == 0, "--lb-bgp-port=0: a port lies between 1 and 65535, such as 1790")
	executable := bird.Executable(c.BirdExecutable)
	_, err := exec.LookPath(executable)
	r.If(err != nil, "--bird-executable=%s: %w: install BIRD, or name its path", executable, err)
	if config != nil {
		for _, g := range config.Attractor.Gateways {
			r.If(g.LocalPort == c.LBBGPPort,
				"gateway %s uses local port %d, which is --lb-bgp-port's: choose another --lb-bgp-port", g.Name, g.LocalPort)
		}
	}
	r.If(c.ImportLimit == 0,
		"--import-limit=0: no gateway could give a route; leave it out for %d", bird.DefaultImportLimit)
	r.Within("--drain-time", c.DrainTime, 0, time.Hour)
	r.Within("--settle", c.Settle, 0, time.Minute)
	r.Within("--ready-timeout", c.ReadyTimeout, 0, time.Hour)
	r.Within("--max-backoff", c.MaxBackoff, 0, 5*time.Minute)
	r.Within("--bird-kernel-scan-time", c.BirdKernelScanTime, time.Second, time.Hour)
	// 0 means the default in the kernel package, but the main table in BIRD.
	r.If(c.TableID == 0 || c.RulePriority == 0,
		"--table-id and --rule-priority must not be 0: leave them out for 4096 and 100")
	err = c.kernelFlags.options().Validate()
	r.If(err != nil, "--table-id, --rule-priority, --mark: %w", err)
	r.OverlapLB(cli.FrontendNumbers(c.TableID, c.RulePriority, c.Mark.Mark, c.Mark.Mask))
}

// checkInterface refuses an external interface that does not exist. config is nil if the trench
// file was refused.
func (c *trenchFlags) checkInterface(config *trench.Config) error {
	what, name := "--external-interface", c.ExternalInterface
	if config != nil && config.Attractor.Interface != name {
		what, name = c.TrenchFile+": attractor.interface", config.Attractor.Interface
	}
	if _, err := net.InterfaceByName(name); err != nil {
		return cli.Usage("%s=%s: there is no such interface in this network namespace (%w)", what, name, err)
	}
	return nil
}

type mark struct{ Mark, Mask uint32 }

func parseMark(s string) (mark, error) {
	value, mask, _ := strings.Cut(s, "/")
	a, errA := strconv.ParseUint(value, 0, 32)
	b, errB := strconv.ParseUint(mask, 0, 32)
	return mark{uint32(a), uint32(b)}, errors.Join(errA, errB)
}

func parseRouterID(s string) (netip.Addr, error) {
	a, err := netip.ParseAddr(s)
	if err == nil && (!a.Is4() || a.IsUnspecified()) {
		err = errors.New("write it like an IPv4 address other than 0.0.0.0")
	}
	return a, err
}

// nextHop is a flag with an address of either family.
type nextHop struct{ netip.Addr }

func parseNextHop(s string) (nextHop, error) {
	a, err := netip.ParseAddr(s)
	if err == nil && (a.IsUnspecified() || a.IsLoopback() || a.IsMulticast() || a.Zone() != "") {
		err = errors.New("write the address of a router on the external network, without a zone")
	}
	return nextHop{a.Unmap()}, err
}

func addresses(list []nextHop) (plain []netip.Addr) {
	for _, n := range list {
		plain = append(plain, n.Addr)
	}
	return plain
}
