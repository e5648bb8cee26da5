package main

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spiffe/go-spiffe/v2/spiffetls/tlsconfig"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/cmd/internal/frontendcmd"
	"github.com/vipgate/vipgate/pkg/frontend"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/logs"
	"github.com/vipgate/vipgate/pkg/meridio/availability"
	"github.com/vipgate/vipgate/pkg/meridio/nsp"
	"github.com/vipgate/vipgate/pkg/meridio/secret"
	"github.com/vipgate/vipgate/pkg/metrics"
	"github.com/vipgate/vipgate/pkg/process"
	"github.com/vipgate/vipgate/pkg/task"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/trench/change"
	"github.com/vipgate/vipgate/pkg/vip"
)

// runCommand runs the frontend. The settings of Meridio are variables and not in the help.
type runCommand struct {
	NSPService       string        `hidden:"" name:"nsp-service" help:"Host and port of the NSP." placeholder:"HOST:PORT" group:"NSP"`
	TrenchName       string        `hidden:"" help:"Name of the trench at the NSP." placeholder:"NAME" group:"NSP"`
	AttractorName    string        `hidden:"" help:"Name of the attractor at the NSP." placeholder:"NAME" group:"NSP"`
	Namespace        string        `hidden:"" help:"Namespace of the Secrets with the gateways' passwords." default:"default" group:"NSP"`
	NSPEntryTimeout  time.Duration `hidden:"" name:"nsp-entry-timeout" help:"How often the registration at the NSP is refreshed, which removes it after 60s." default:"30s" group:"NSP"`
	NSPKeepaliveTime time.Duration `hidden:"" name:"nsp-keepalive-time" help:"How long the connection to the NSP is silent before it is probed; less than 10s means 10s." default:"30s" group:"NSP"`

	ExternalInterface string        `hidden:"" help:"Interface toward the gateways." default:"ext-vlan" placeholder:"NAME" group:"BGP"`
	LocalAS           uint32        `hidden:"" name:"local-as" help:"Local AS number, where the NSP names none." default:"8103" placeholder:"AS" group:"BGP"`
	RemoteAS          uint32        `hidden:"" name:"remote-as" help:"AS number of gateways, where the NSP names none." default:"4248829953" placeholder:"AS" group:"BGP"`
	BGPLocalPort      uint16        `hidden:"" name:"bgp-local-port" help:"Local BGP port, where the NSP names none." default:"10179" placeholder:"PORT" group:"BGP"`
	BGPRemotePort     uint16        `hidden:"" name:"bgp-remote-port" help:"Gateways' BGP port, where the NSP names none." default:"10179" placeholder:"PORT" group:"BGP"`
	BGPHoldTime       time.Duration `hidden:"" name:"bgp-hold-time" help:"Hold time, where the NSP names none." default:"3s" group:"BGP"`
	VRRP              []netip.Addr  `hidden:"" name:"vrrp" help:"Next hop of static default routes, such as a VRRP address, repeatable. With one, no route is taken from gateways." placeholder:"ADDR" group:"BGP"`

	MaxRemoval int `help:"Percentage of the VIPs in force that the NSP may remove without a confirmation; 100 never asks for one, as Meridio." default:"100" placeholder:"PERCENT" group:"NSP"`

	BirdKernelScanTime time.Duration `hidden:"" help:"How often BIRD reads the kernel's routes." default:"10s" group:"BIRD"`
	BirdLogFile        string        `hidden:"" help:"BIRD's own log file." default:"/var/log/bird.log" type:"path" placeholder:"FILE" group:"BIRD"`
	BirdLogFileSize    int           `hidden:"" help:"Size in bytes of BIRD's own log file; 0 writes none." default:"20000" placeholder:"BYTES" group:"BIRD"`
	LogBird            bool          `hidden:"" help:"Log BIRD's own lines at level info instead of debug." negatable:"" group:"BIRD"`

	MaxBackoff     time.Duration `hidden:"" help:"Longest wait between attempts to reach the load balancer or the NSP." default:"2s"`
	MetricsEnabled bool          `hidden:"" help:"Serve metrics." default:"true" negatable:"" group:"Listeners"`
	HealthSocket   string        `hidden:"" help:"Unix socket of a second gRPC health service, for exec probes; the service without a name has the state of Liveness there. None when empty." default:"unix:///tmp/health.sock" placeholder:"SOCKET" group:"Listeners"`

	frontendcmd.Flags
}

// cacheName is the file in --bird-dir that keeps the last configuration of the NSP.
const cacheName = "nsp.json"

func (c *runCommand) Run(ctx context.Context, stderr *logs.Writer) error {
	// Memory peaks during the start; frontend.Options.Started ends this.
	started := cli.CollectOften()
	warnIgnored(os.Environ(), stderr)
	o, err := c.options(c.Settings(stderr))
	if err != nil {
		return err
	}
	// Another container of the pod may create the interface later. The frontend waits for it.
	if err := frontendcmd.CheckInterface("--external-interface", c.ExternalInterface); err != nil {
		o.Log.Warn("external interface does not exist yet", "error", err)
	}
	o.Started = started
	// These are the signals of Meridio's frontend: SIGUSR2 logs more, SIGUSR1 reverts that.
	o.Signals = logs.HandleSignals(o.Level, o.Log, map[os.Signal]func(){
		syscall.SIGUSR1: o.Level.Reset, syscall.SIGUSR2: func() { _ = o.Level.Set("debug") }, // a valid level
	})
	return c.RunUntilStopped(ctx, func() (frontend.Options, error) { return o, nil })
}

// check refuses flags that would fail after the start.
func (c *runCommand) check() error {
	var refused cli.Refusals
	if err := c.defaults().Validate(); err != nil {
		refused.Add(fmt.Errorf("--external-interface, --local-as, --remote-as, --bgp-local-port, --bgp-remote-port, "+
			"--bgp-hold-time: %w", err))
	}
	host, port, err := net.SplitHostPort(c.NSPService)
	number, errPort := strconv.ParseUint(port, 10, 16)
	refused.If(err != nil || host == "" || errPort != nil || number == 0,
		"--nsp-service=%s: write host and port of the NSP, such as nsp-service-trench-a:7778", c.NSPService)
	const remedy = "write 1 to 60 characters out of A-Z a-z 0-9 _ . -"
	refused.If(!nsp.ValidName(c.TrenchName), "--trench-name=%s: %s", c.TrenchName, remedy)
	refused.If(!nsp.ValidName(c.AttractorName), "--attractor-name=%s: %s", c.AttractorName, remedy)
	refused.Add(secret.CheckNamespace(c.Namespace))
	refused.If(c.MaxRemoval < 1 || c.MaxRemoval > 100,
		"--max-removal=%d: write a percentage between 1 and 100", c.MaxRemoval)
	refused.Within("--nsp-entry-timeout", c.NSPEntryTimeout, time.Second, time.Minute)
	refused.Within("--nsp-keepalive-time", c.NSPKeepaliveTime, 0, 24*time.Hour)
	refused.Within("--max-backoff", c.MaxBackoff, 0, 5*time.Minute)
	refused.Within("--bird-kernel-scan-time", c.BirdKernelScanTime, time.Second, time.Hour)
	if c.HealthSocket != "" {
		refused.Socket("--health-socket", c.HealthSocket)
	}
	for i, hop := range c.VRRP {
		c.VRRP[i] = hop.Unmap()
		refused.If(hop.IsUnspecified() || hop.IsLoopback() || hop.IsMulticast() || hop.Zone() != "",
			"--vrrp=%s: write the address of a router on the external network, without a zone", hop)
	}
	c.Check(&refused)
	refused.If(c.PeerCredentials(), "--identity=peer-credentials: the NSP is on another host, and needs an SVID")
	refused.Add(c.CachedIdentity.Check(frontendcmd.DefaultID, true))
	return refused.Err()
}

// options returns the options of a frontend with the NSP as the source of its configuration.
func (c *runCommand) options(settings process.Settings) (frontend.Options, error) {
	if err := c.check(); err != nil {
		return frontend.Options{}, err
	}
	host, err := os.Hostname()
	if err != nil {
		return frontend.Options{}, fmt.Errorf(
			"failed to read the host name, by which load balancer and frontend of a pod find each other: %w", err)
	}
	log := settings.Log
	own, err := c.Source(frontendcmd.DefaultID, log)
	if err != nil {
		return frontend.Options{}, cli.Usage("%w", err)
	}
	if !c.MetricsEnabled {
		settings.MetricsAddr = ""
	}
	o := c.Options(own, c.authorizeLB(own, log), settings)
	o.HealthSocket, o.BIRD.VRRP = c.HealthSocket, c.VRRP
	o.BIRD.LogFile, o.BIRD.LogFileSize, o.BIRD.LogBIRD = c.BirdLogFile, c.BirdLogFileSize, c.LogBird
	o.BIRD.KernelScanTime, o.MaxBackoff = c.BirdKernelScanTime, c.MaxBackoff

	// The watcher of Secrets writes the passwords that the NSP's gateways name, and explains why
	// one is missing.
	secrets := secret.New(secret.Options{
		Dir: c.BirdDir, Namespace: c.Namespace, Log: log,
		Host: os.Getenv("KUBERNETES_SERVICE_HOST"), Port: os.Getenv("KUBERNETES_SERVICE_PORT"),
	})
	o.BIRD.ExplainPassword = secrets.Explain
	client := c.nspOptions(own, host, log)
	client.Keys = secrets
	source := nsp.NewSource(client)
	o.Source, o.SourceName, o.StaleCondition = source, client.String(), nsp.Condition

	// The frontend publishes the inputs of the registration and of the fallback.
	o.Connected, o.InForce = latest.New(false), latest.New(&change.InForce{})
	registration := nsp.NewRegistration(client, o.Connected.Get)
	vips := func() ([]vip.VIP, <-chan struct{}) {
		inForce, changed := o.InForce.Get()
		return inForce.Attractor.VIPs, changed
	}
	lb := availability.NewClient(availability.ClientOptions{Host: host, VIPs: vips, Log: log})
	o.Fallback, o.Tasks = lb, []task.Task{registration, secrets}
	// Each scrape reads copies; none of these calls blocks.
	o.Collectors = []prometheus.Collector{metrics.NewMeridio(func() metrics.Meridio {
		watch, registered := source.State().Load(), registration.State().Load()
		m := metrics.Meridio{
			Connected: watch.Connected, Cached: watch.FromCache, WatchFailures: watch.Failures,
			CacheFailures: watch.CacheFailures, Refused: watch.Refused.ByKind(),
			Registered: registered.Registered, RegistrationFailures: registered.Failures,
			ProbeFailures: lb.Stats().Failures,
		}
		m.SecretFailures, m.SecretsUnknown = secrets.Stats()
		return m
	})}
	return o, nil
}

func (c *runCommand) defaults() trench.Defaults {
	return trench.Defaults{
		Interface: c.ExternalInterface,
		LocalASN:  c.LocalAS, RemoteASN: c.RemoteAS, LocalPort: c.BGPLocalPort, RemotePort: c.BGPRemotePort,
		HoldTime: c.BGPHoldTime,
	}
}

// nspOptions returns the options of the client of the NSP. host is the name of the pod.
func (c *runCommand) nspOptions(own *identity.Source, host string, log *slog.Logger) nsp.Options {
	return nsp.Options{
		Target: c.NSPService, Trench: c.TrenchName, Attractor: c.AttractorName, Defaults: c.defaults(),
		MaxRemoval: c.MaxRemoval,
		Credentials: identity.NewCredentials(own, identity.CredentialOptions{
			Authorize: identity.AuthorizeOwnDomain(own), Log: log,
		}),
		Cache: filepath.Join(c.BirdDir, cacheName), Host: host,
		EntryTimeout: c.NSPEntryTimeout, KeepaliveTime: c.NSPKeepaliveTime, MaxBackoff: c.MaxBackoff, Log: log,
	}
}

// authorizeLB returns the authorizer of the load balancer. Without a flag that names its SPIFFE ID,
// the load balancer has the ID of the frontend or another ID of the trench.
func (c *runCommand) authorizeLB(own *identity.Source, log *slog.Logger) tlsconfig.Authorizer {
	if c.NamesLB() {
		return identity.AuthorizeMember(c.LBTrustDomain, c.LBID...)
	}
	log.Warn("every member of the own trust domain is authorized as the load balancer, as in Meridio: "+
		"restrict it with --lb-id", "nsp", c.NSPService)
	return identity.AuthorizeOwnDomain(own)
}
