package main

import (
	"context"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"slices"
	"strconv"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/pkg/dataplane"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/lb"
	"github.com/vipgate/vipgate/pkg/logs"
	"github.com/vipgate/vipgate/pkg/process"
	"github.com/vipgate/vipgate/pkg/tracing"
	"github.com/vipgate/vipgate/pkg/trench"
	trenchfile "github.com/vipgate/vipgate/pkg/trench/file"
)

// defaultID is the SPIFFE ID of an lb with the development authority.
const defaultID = "spiffe://vipgate.local/lb"

type runFlags struct {
	TrenchFile string      `help:"The trench file." default:"/etc/vipgate/trench/trench.yaml" type:"path" placeholder:"FILE"`
	Socket     string      `help:"Unix socket on which readiness is served." default:"unix:///var/lib/meridio/lb.sock" placeholder:"SOCKET"`
	SocketMode fs.FileMode `help:"Permissions of the socket: 0600, or 0660 for a group that both containers share." default:"0600" placeholder:"MODE"`

	FrontendID          []spiffeid.ID        `name:"frontend-id" help:"SPIFFE ID that may watch and report; repeatable." placeholder:"ID" group:"Identity"`
	FrontendTrustDomain spiffeid.TrustDomain `help:"Authorize every member of this trust domain to watch and report: the widest setting." placeholder:"TD" group:"Identity"`
	FrontendUID         []uint32             `name:"frontend-uid" help:"User that may watch and report, with --identity=peer-credentials; repeatable. Its own when absent." placeholder:"UID" group:"Identity"`
	ReaderID            []spiffeid.ID        `name:"reader-id" help:"SPIFFE ID that may watch and get, never report; repeatable." placeholder:"ID" group:"Identity"`
	cli.CachedIdentity

	targetFlags
	dataPlaneFlags

	Lease      time.Duration  `help:"How long each message stays valid." default:"${lease}"`
	StaleGrace *time.Duration `help:"How long the data plane continues to forward without this process; when absent 5s with a data plane, 0s with --dataplane=none." placeholder:"DURATION"`
	DrainTime  time.Duration  `help:"How long traffic is forwarded after SIGTERM." default:"1s"`

	cli.Process
}

type runCommand struct{ runFlags }

type validateCommand struct {
	runFlags
	cli.ValidateFlags
}

func (c *runCommand) Run(ctx context.Context, stderr *logs.Writer) error {
	settings := c.Settings(stderr)
	tracer, err := tracing.New("lb", settings.Version, settings.Log)
	if err != nil {
		return cli.Usage("%w", err)
	}
	settings.Tracer = tracer
	settings.Trial = trenchfile.OpenTrial(c.StateDir, settings.Log)
	// A stop during the start ends the trial, too.
	err = cli.RunUntilStopped(c.DrainTime, func(stops <-chan struct{}) error { return c.run(ctx, settings, stops) })
	settings.Trial.End()
	return err
}

func (c *runCommand) run(ctx context.Context, settings process.Settings, stops <-chan struct{}) error {
	// Memory peaks during the start; lb.Options.Configured ends this.
	configured := cli.CollectOften()
	o, err := cli.Start(stops, func() (lb.Options, error) { return c.options(settings, true) })
	if err != nil {
		return err
	}
	// Two load balancers would repair each other's rules and sets.
	release, err := identity.OwnNetNS(ctx, "lb", "admin socket "+c.AdminSocket,
		identity.NetNSFallback{AdminSocket: c.AdminSocket, Log: o.Log})
	if err != nil {
		return err
	}
	defer release()
	cli.WarnOfTarget(ctx, o.Log)
	// Fail before readiness is served: VIPs must not rise on a kernel that cannot forward.
	if o.DataPlane != nil {
		if err := refuse(dataplane.Preflight(*o.DataPlane)); err != nil {
			return err
		}
		for _, p := range dataplane.Advice(*o.DataPlane) {
			o.Log.Warn("kernel parameter should be set", "parameter", p.Object, "problem", p.Detail, "remedy", p.Remedy)
		}
	}
	o.Configured = configured
	o.Log.Info("starting lb", "version", o.Version, "trench_file", c.TrenchFile)
	return lb.Run(ctx, o, stops)
}

func (c *validateCommand) Run(ctx context.Context, out *cli.Output) error {
	config, err := c.validate()
	if err != nil {
		return err
	}
	return c.Report(ctx, out, "lb", c.AdminSocket, c.TrenchFile, config, trench.DefaultDefaults(), c.DrainTime)
}

func (c *validateCommand) validate() (*trench.Config, error) {
	if c.File == "" {
		o, err := c.options(process.Settings{Log: slog.New(slog.DiscardHandler)}, false)
		return o.Config, err
	}
	// A named file is checked alone: the flags of its lb are unknown outside of the pod.
	c.TrenchFile = c.File
	config, err := trenchfile.Read(c.File, trench.DefaultDefaults())
	if err != nil {
		return nil, cli.Usage("trench file refused:\n%w", err)
	}
	return config, nil
}

// options returns the options of the load balancer. If lenient, it accepts a refused trench file,
// or one that lacks a stream: an operator can repair it while lb runs, and the watcher reports it.
func (c *runFlags) options(settings process.Settings, lenient bool) (lb.Options, error) {
	var refused cli.Refusals
	c.check(&refused)
	frontends := c.Peers(&refused, cli.Peers{
		Flag: "--frontend", IDs: c.FrontendID, TrustDomain: c.FrontendTrustDomain, UIDs: c.FrontendUID,
	})
	refused.Add(c.CachedIdentity.Check(defaultID, lenient))
	// Refused flags leave the trial of the trench file as it is.
	if err := refused.Err(); err != nil && lenient {
		return lb.Options{}, err
	}
	config, err := settings.Trial.Read(c.TrenchFile, trench.DefaultDefaults())
	if err != nil && !lenient {
		refused = append(cli.Refusals{fmt.Errorf("trench file refused:\n%w", err)}, refused...)
	}
	// Only validate refuses what the trench file may correct later.
	for _, problem := range slices.Concat(c.unknownStreams(config), c.loopbackTargets(config)) {
		if lenient {
			settings.Log.Warn("trench file does not fit the flags", "problem", problem)
		} else {
			refused.Add(problem)
		}
	}
	if err := refused.Err(); err != nil {
		return lb.Options{}, err
	}
	source, err := c.CachedIdentity.Source(defaultID, settings.Log)
	if err != nil {
		return lb.Options{}, cli.Usage("%w", err)
	}
	return lb.Options{
		Settings: settings, TrenchFile: c.TrenchFile, Defaults: trench.DefaultDefaults(), Config: config,
		Socket: c.Socket, SocketMode: c.SocketMode, Identity: source,
		Frontends: frontends, FrontendDomain: c.FrontendTrustDomain, Readers: c.ReaderID,
		Lease: c.Lease, StaleGrace: c.staleGrace(), DrainTime: c.DrainTime, Targets: c.targetFlags.options(),
		Probes: c.ProbeID, ProbeQuorum: c.ProbeQuorum,
		DataPlane: c.dataPlaneFlags.options(), VIPInterface: c.VIPInterface,
	}, nil
}

// staleGrace returns the flag, or the default for the data plane.
func (c *runFlags) staleGrace() time.Duration {
	switch {
	case c.StaleGrace != nil:
		return *c.StaleGrace
	// The kernel forwards without this process, so a restart need not withdraw VIPs.
	case c.on():
		return dataPlaneGrace
	}
	return 0
}

// check refuses values that would fail later.
func (c *runFlags) check(r *cli.Refusals) {
	err := lb.ValidateLease(c.Lease)
	r.If(err != nil, "--lease: %w", err)
	r.If(c.PeerCredentials() && c.RegistryAddress != "",
		"--registry-address conflicts with --identity=peer-credentials, which has no identities over TCP")
	r.Within("--drain-time", c.DrainTime, 0, time.Hour)
	r.Within("--stale-grace", c.staleGrace(), 0, 10*time.Minute)
	c.targetFlags.check(r)
	c.dataPlaneFlags.check(r)
	r.Socket("--socket", c.Socket)
	_, registry, _ := net.SplitHostPort(c.RegistryAddress)
	port, _ := strconv.ParseUint(registry, 10, 16) // checked by the target flags
	c.Process.Check(r, cli.Port{Flag: "--registry-address", Port: uint16(port)})
}

// unknownStreams returns an error for each stream of --target-id that the configuration lacks. The
// trench file may add them later, so they must not prevent a start.
func (c *runFlags) unknownStreams(config *trench.Config) (problems []error) {
	if config == nil {
		return nil
	}
	for _, a := range c.TargetID {
		known := func(s trench.Stream) bool { return s.Name == a.Stream }
		if a.Stream != "" && !slices.ContainsFunc(config.Streams, known) {
			problems = append(problems, fmt.Errorf("--target-id=%s: the trench file has no stream %s", a, a.Stream))
		}
	}
	return problems
}

// loopbackTargets returns an error for each target that is this host, if a data plane forwards.
func (c *runFlags) loopbackTargets(config *trench.Config) (problems []error) {
	if config == nil || !c.on() {
		return nil
	}
	for _, stream := range config.Streams {
		for _, target := range stream.Targets {
			for _, address := range target.IPs {
				if address.IsLoopback() {
					problems = append(problems, fmt.Errorf("target %s of stream %s has address %s, which needs --dataplane=none",
						target.Name, stream.Name, address))
				}
			}
		}
	}
	return problems
}
