package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"

	"github.com/alecthomas/kong"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/cmd/internal/frontendcmd"
	"github.com/vipgate/vipgate/pkg/frontend"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/logs"
	"github.com/vipgate/vipgate/pkg/policy"
	"github.com/vipgate/vipgate/pkg/process"
	"github.com/vipgate/vipgate/pkg/tracing"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/trench/change"
	trenchfile "github.com/vipgate/vipgate/pkg/trench/file"
)

type trenchFlags struct {
	TrenchFile        string `help:"The trench file." default:"/etc/vipgate/trench/trench.yaml" type:"path" placeholder:"FILE"`
	ExternalInterface string `help:"Interface toward the gateways, where the trench file names none." default:"ext-vlan" placeholder:"NAME" group:"BGP"`
}

type runFlags struct {
	trenchFlags
	frontendcmd.Flags
	frontendcmd.SpeakerFlags

	LBUID []uint32 `name:"lb-uid" help:"User of the load balancer, with --identity=peer-credentials; repeatable. Its own when absent." placeholder:"UID" group:"Identity"`
}

// AfterApply records which flags the user set.
func (c *runFlags) AfterApply(parsed *kong.Context) error {
	c.Record(parsed)
	c.Foreign = c.IsExternal()
	return c.Flags.AfterApply(parsed)
}

type runCommand struct{ runFlags }

type validateCommand struct {
	runFlags
	cli.ValidateFlags
}

type renderCommand struct {
	trenchFlags
	frontendcmd.BirdFlags
	frontendcmd.KernelFlags
}

func (c *runCommand) Run(ctx context.Context, stderr *logs.Writer) error {
	settings := c.Settings(stderr)
	tracer, err := tracing.New("frontend", settings.Version, settings.Log)
	if err != nil {
		return cli.Usage("%w", err)
	}
	settings.Tracer = tracer
	settings.Trial = trenchfile.OpenTrial(c.BirdDir, settings.Log)
	err = c.RunUntilStopped(ctx, func() (frontend.Options, error) { return c.start(settings) })
	settings.Trial.End()
	return err
}

func (c *runCommand) start(settings process.Settings) (frontend.Options, error) {
	// Memory peaks during the start; frontend.Options.Started ends this.
	started := cli.CollectOften()
	// A refused trench file must not prevent the start: the watcher reports it.
	o, config, err := c.options(settings, true)
	if err == nil && c.RoutesSource() {
		err = c.checkInterface(config)
	}
	o.Started = started
	return o, err
}

func (c *validateCommand) Run(ctx context.Context, out *cli.Output) error {
	config, err := c.validate()
	if err != nil {
		return err
	}
	return c.Report(ctx, out, "frontend", c.AdminSocket, c.TrenchFile, config, c.defaults(), c.DrainTime)
}

func (c *validateCommand) validate() (*trench.Config, error) {
	// A named file is checked alone: flags, identity and interfaces belong to the pod.
	if c.File != "" {
		c.TrenchFile = c.File
		var refused cli.Refusals
		config, err := c.read(nil, false)
		refused.Add(err)
		c.checkPorts(&refused, config)
		return config, refused.Err()
	}
	o, config, err := c.options(process.Settings{Log: slog.New(slog.DiscardHandler)}, false)
	if err != nil {
		return nil, err
	}
	if c.IsExternal() {
		return config, nil
	}
	if err := c.checkInterface(config); err != nil {
		fmt.Fprintf(os.Stderr, "frontend: warning: %v\n", err)
	} else {
		// The interface is absent outside of the pod. If it exists, the preview finds gateways that
		// would have no session.
		_, problems, err := o.BIRD.Preview(config.Attractor)
		if err != nil {
			return nil, err
		}
		writeProblems("frontend: warning", config.Attractor.Gateways, problems)
	}
	return config, nil
}

// Run prints BIRD's configuration for the current trench file and interfaces.
func (c *renderCommand) Run(out *cli.Output) error {
	config, err := c.read(nil, false)
	if err != nil {
		return err
	}
	o := c.BirdFlags.Options(&c.KernelFlags)
	// Preview masks passwords: any value renders the session as it runs.
	o.Password = "generated at each start"
	content, problems, err := o.Preview(config.Attractor)
	if err != nil {
		return err
	}
	writeProblems("frontend", config.Attractor.Gateways, problems)
	out.Printf("%s", content)
	// BIRD's configuration has no policies: the announcer attaches their attributes to routes.
	for i, line := range policy.Describe(config.Attractor.Policies) {
		if i == 0 {
			out.Printf("\n# Routing policies, which the frontend attaches to the routes of VIPs:\n")
		}
		out.Printf("# %s\n", line)
	}
	return nil
}

// writeProblems prints why gateways would have no session in the current network namespace.
func writeProblems(prefix string, gateways []trench.Gateway, problems map[string]string) {
	for _, gateway := range gateways {
		if problem := problems[gateway.Name]; problem != "" {
			fmt.Fprintf(os.Stderr, "%s: gateway %s has no session: %s\n", prefix, gateway.Name, problem)
		}
	}
}

// defaults returns the values of fields that are missing in the trench file.
func (c *trenchFlags) defaults() trench.Defaults {
	d := trench.DefaultDefaults()
	d.Interface = c.ExternalInterface
	return d
}

// read reads the trench file. With lenient it returns nil without an error for a refused file. The
// watcher reports the refusal until the file is corrected.
func (c *trenchFlags) read(trial *trenchfile.Trial, lenient bool) (*trench.Config, error) {
	if err := c.defaults().Validate(); err != nil {
		return nil, cli.Usage("--external-interface: %w", err)
	}
	config, err := trial.Read(c.TrenchFile, c.defaults())
	if err != nil && !lenient {
		return nil, cli.Usage("trench file refused:\n%w", err)
	}
	return config, nil
}

// checkInterface refuses a missing external interface. config is nil if the file was refused.
func (c *trenchFlags) checkInterface(config *trench.Config) error {
	// The error names the setting that the user has to change.
	if config != nil && config.Attractor.Interface != c.ExternalInterface {
		return frontendcmd.CheckInterface(c.TrenchFile+": attractor.interface", config.Attractor.Interface)
	}
	return frontendcmd.CheckInterface("--external-interface", c.ExternalInterface)
}

// checkPorts refuses gateways with the loopback session's port. config is nil for a refused file.
func (c *runFlags) checkPorts(refused *cli.Refusals, config *trench.Config) {
	if config == nil {
		return
	}
	// BIRD would have to listen on the port for both sessions.
	for _, gateway := range config.Attractor.Gateways {
		refused.If(gateway.LocalPort == int(c.LBBGPPort),
			"gateway %s uses local port %d, which is --lb-bgp-port's: choose another --lb-bgp-port", gateway.Name,
			gateway.LocalPort)
	}
}

// options returns the options of a frontend and the configuration in the trench file, which is nil
// if lenient and the file was refused.
func (c *runFlags) options(settings process.Settings, lenient bool) (frontend.Options, *trench.Config, error) {
	var refused cli.Refusals
	c.Check(&refused)
	if c.UsesLB() {
		c.LBID = c.Peers(&refused, cli.Peers{
			Flag: "--lb", IDs: c.LBID, TrustDomain: c.LBTrustDomain, UIDs: c.LBUID,
		})
		refused.Add(c.CachedIdentity.Check(frontendcmd.DefaultID, lenient))
	}
	// Refused flags leave the trial of the trench file as it is.
	if err := refused.Err(); err != nil && lenient {
		return frontend.Options{}, nil, err
	}
	config, err := c.read(settings.Trial, lenient)
	if err != nil {
		refused = append(cli.Refusals{err}, refused...)
	}
	device := c.ExternalInterface
	if config != nil {
		device = config.Attractor.Interface
	}
	c.Complete(device, c.TrenchFile)
	c.CheckSpeaker(&refused)
	// A running frontend takes such an edit, so its next start must take it, too.
	if !lenient {
		c.checkPorts(&refused, config)
	}
	if err := refused.Err(); err != nil {
		return frontend.Options{}, nil, err
	}
	var own *identity.Source
	if c.UsesLB() {
		if own, err = c.Source(frontendcmd.DefaultID, settings.Log); err != nil {
			return frontend.Options{}, nil, cli.Usage("%w", err)
		}
	}
	o := c.Options(own, identity.AuthorizeMember(c.LBTrustDomain, c.LBID...), settings)
	if o.External, err = c.External(c.RouterID, settings.Log); err != nil {
		return frontend.Options{}, nil, cli.Usage("%w", err)
	}
	o.Kernel.Foreign, o.Kernel.ForeignRoutes = !c.RoutesSource(), c.IsExternal()
	watcher := trenchfile.NewWatcher(c.TrenchFile, c.defaults(), config, settings.Log)
	watcher.Trial = settings.Trial
	// The frontend has no verdicts on targets; lb holds their removal.
	watcher.Hold = func(inForce, next *trench.Config, before trench.Held, confirmed string,
	) (*trench.Config, trench.Held) {
		return change.Hold(inForce, next, before, confirmed, nil)
	}
	watcher.Resume()
	o.Source = watcher
	o.SourceName, o.StaleCondition = "trench file", frontend.TrenchFile
	return o, config, nil
}
