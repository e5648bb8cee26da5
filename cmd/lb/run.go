package main

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"slices"
	"time"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/lb"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/trench"
)

// runFlags are the flags of `lb run` and `lb validate`.
type runFlags struct {
	TrenchFile string   `help:"The trench file." default:"/etc/vipgate/trench/trench.yaml" type:"path" placeholder:"FILE"`
	Socket     string   `help:"Unix socket on which readiness is served." default:"unix:///var/lib/meridio/lb.sock" placeholder:"SOCKET"`
	SocketMode cli.Mode `help:"Permissions of the socket: 0600, or 0660 for a group that both containers share." default:"0600" placeholder:"MODE"`

	FrontendID          []cli.SPIFFEID  `name:"frontend-id" help:"SPIFFE ID that may watch and report; repeatable." placeholder:"ID" group:"Identity"`
	FrontendTrustDomain cli.TrustDomain `help:"Let every member of this trust domain watch and report: the widest setting." placeholder:"TD" group:"Identity"`
	ReaderID            []cli.SPIFFEID  `name:"reader-id" help:"SPIFFE ID that may watch and get, never report; repeatable." placeholder:"ID" group:"Identity"`
	cli.Identity

	targetFlags
	dataPlaneFlags

	Lease             time.Duration  `help:"How long the frontend may believe each message." default:"1s"`
	StaleGrace        *time.Duration `help:"How long the data plane goes on forwarding without this process; when absent 5s with --dataplane=nftables, else 0s." placeholder:"DURATION"`
	DrainTime         time.Duration  `help:"How long traffic is forwarded after SIGTERM." default:"1s"`
	MaxStreamsPerPeer int            `help:"How many streams one SPIFFE ID may have open." default:"8" placeholder:"N"`

	AdminSocket string `help:"Unix socket for status, grpcurl and pprof." default:"${admin_socket}" placeholder:"SOCKET" group:"Listeners"`
	HealthPort  uint16 `help:"Port of the gRPC health service." default:"7781" placeholder:"PORT" group:"Listeners"`
	MetricsPort uint16 `help:"Port of the Prometheus metrics; 0 serves none." default:"2223" placeholder:"PORT" group:"Listeners"`
	cli.Listeners
	cli.Log
}

type runCommand struct{ runFlags }

type validateCommand struct{ runFlags }

// Run runs the load balancer.
func (c *runCommand) Run(ctx context.Context, globals *cli.Globals) error {
	log, level, err := c.Logger(globals.Debug)
	if err != nil {
		return usage("%w", err)
	}
	o, err := c.options(log)
	if err != nil {
		return err
	}
	release, err := identity.OwnNetNS(ctx, "lb", "admin socket "+c.AdminSocket)
	if err != nil {
		return err
	}
	defer release()
	if err := preflight(o.DataPlane); err != nil {
		return err
	}
	o.Version, o.Level = cli.Version(), level
	log.Info("starting lb", "version", o.Version, "trench_file", c.TrenchFile)
	return cli.RunUntilStopped(c.DrainTime, func(stops <-chan struct{}) error { return lb.Run(ctx, o, stops) })
}

// Run checks what `lb run` would check.
func (c *validateCommand) Run(_ *cli.Globals, out *cli.Output) error {
	if _, _, err := c.Logger(false); err != nil {
		return usage("%w", err)
	}
	if _, err := c.options(slog.New(slog.DiscardHandler)); err != nil {
		return err
	}
	out.Printf("%s: valid\n", c.TrenchFile)
	return nil
}

func (c *runFlags) options(log *slog.Logger) (lb.Options, error) {
	config, err := trench.Read(c.TrenchFile, trench.DefaultDefaults())
	if err != nil {
		return lb.Options{}, usage("trench file refused:\n%w", err)
	}
	if err := c.check(); err != nil {
		return lb.Options{}, err
	}
	if len(c.FrontendID) == 0 && c.FrontendTrustDomain.IsZero() {
		return lb.Options{}, usage("nobody may watch: name the frontend's SPIFFE ID with --frontend-id")
	}
	source, err := c.Identity.Source("spiffe://vipgate.local/lb", log)
	if err != nil {
		return lb.Options{}, usage("%w", err)
	}

	o := lb.Options{
		TrenchFile: c.TrenchFile, Defaults: trench.DefaultDefaults(), Config: config,
		Socket: c.Socket, SocketMode: fs.FileMode(c.SocketMode), Identity: source,
		Frontends: cli.IDs(c.FrontendID), Readers: cli.IDs(c.ReaderID), MaxStreamsPerPeer: c.MaxStreamsPerPeer,
		AdminSocket: c.AdminSocket, HealthAddr: cli.Address(c.HealthHost, c.HealthPort),
		Lease: c.Lease, StaleGrace: c.staleGrace(), DrainTime: c.DrainTime, Targets: c.targetFlags.options(),
		DataPlane: c.dataPlaneFlags.options(), RemoveDataPlane: c.RemoveDataplaneOnExit, Log: log,
	}
	if c.MetricsPort != 0 {
		o.MetricsAddr = cli.Address(c.MetricsHost, c.MetricsPort)
	}
	o.FrontendDomain = c.FrontendTrustDomain.TrustDomain
	return o, nil
}

// staleGrace is what is set, or what fits the data plane.
func (c *runFlags) staleGrace() time.Duration {
	switch {
	case c.StaleGrace != nil:
		return *c.StaleGrace
	case c.on():
		return dataPlaneGrace
	}
	return 0
}

// check refuses what would only fail later.
func (c *runFlags) check() error {
	if err := lb.ValidateLease(c.Lease); err != nil {
		return usage("--lease: %w", err)
	}
	if c.DrainTime < 0 || c.staleGrace() < 0 {
		return usage("--drain-time and --stale-grace must not be negative")
	}
	if c.MaxStreamsPerPeer < readiness.MinStreamsPerPeer {
		return usage("--max-streams-per-peer=%d: a frontend needs %d while it moves to another connection", c.MaxStreamsPerPeer, readiness.MinStreamsPerPeer)
	}
	if err := c.targetFlags.check(); err != nil {
		return err
	}
	if err := c.dataPlaneFlags.check(); err != nil {
		return err
	}
	if c.on() && slices.Contains(c.targetFlags.Source, "directory") {
		return usage("--dataplane=nftables forwards itself, and --source=directory says what another data plane forwards: leave out one of them")
	}
	return errors.Join(cli.CheckSocket("--socket", c.Socket), cli.CheckSocket("--admin-socket", c.AdminSocket), cli.CheckHealthPort(c.HealthPort))
}
