package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os/signal"
	"syscall"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"go.yaml.in/yaml/v4"
	"google.golang.org/grpc"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/logs"
	"github.com/vipgate/vipgate/pkg/metrics"
	"github.com/vipgate/vipgate/pkg/probe"
	"github.com/vipgate/vipgate/pkg/probe/feed"
	"github.com/vipgate/vipgate/pkg/process"
	"github.com/vipgate/vipgate/pkg/registration"
	"github.com/vipgate/vipgate/pkg/task"
	"github.com/vipgate/vipgate/pkg/trench"
	trenchfile "github.com/vipgate/vipgate/pkg/trench/file"
	"github.com/vipgate/vipgate/pkg/vip"
)

type runCommand struct {
	TrenchFile string    `help:"Trench file with VIPs and checks." type:"path" placeholder:"FILE"`
	VIP        []vip.VIP `name:"vip" help:"VIP to probe, without a trench file; repeatable." placeholder:"VIP"`
	Check      string    `help:"Check of these VIPs, as in the trench file: {tcp: {port: 5000}}." placeholder:"YAML"`

	Ports    int           `help:"Source ports toward each VIP, at most 64." default:"4"`
	PortBase uint16        `help:"The first of them, outside of ip_local_port_range." default:"31000" placeholder:"PORT"`
	Source   []netip.Addr  `help:"Address to probe from; repeatable. The kernel selects it when absent." placeholder:"ADDR"`
	Interval time.Duration `help:"Time between two checks of a path." default:"500ms"`
	Timeout  time.Duration `help:"How long a check may take." default:"500ms"`
	Fall     int           `help:"Failures in a row that make a path dead." default:"2"`
	Rate     int           `help:"Checks that may start in a second; more paths have a longer interval." default:"4000"`

	Once   bool   `help:"Print the verdicts and exit: 0 if all paths are reachable, 1 if one is dead, 3 if one is unknown." env:"-"`
	Output string `short:"o" help:"table or json, of --once." enum:"table,json" default:"table" env:"-"`

	LB   []string    `name:"lb" help:"Load balancers that get the verdicts, at their --registry-address; repeatable. HOST may be a name of several." placeholder:"HOST:PORT" group:"Feedback"`
	LBID spiffeid.ID `name:"lb-id" help:"SPIFFE ID of the load balancers." placeholder:"ID" group:"Feedback"`

	cli.Identity
	cli.Process
}

// exitUnknown is the exit status of --once if no path is dead, and some could not be checked.
const exitUnknown = 3

// Health services of vipgate-probe, in addition to "".
const (
	liveness  = "Liveness"
	readiness = "Readiness" // every path has a recent verdict, whatever it is
)

func (c *runCommand) Run(ctx context.Context, out *cli.Output, stderr *logs.Writer) error {
	settings := c.Settings(stderr)
	config, err := c.configuration()
	if err != nil && c.Once {
		return err
	}
	targets, refused := c.targets(config), cli.Refusals{}
	if err != nil && !c.Once {
		settings.Log.Error("trench file refused", "error", err)
	}
	c.check(&refused)
	if err := refused.Err(); err != nil {
		return err
	}
	if c.Once {
		settings.Log = slog.New(slog.DiscardHandler) // the output has every state
	}
	prober := probe.New(probe.Options{
		Log: settings.Log, Interval: c.Interval, Timeout: c.Timeout, Fall: c.Fall, Rate: c.Rate, Ports: c.Ports,
		First: c.PortBase, Sources: c.Source,
	})
	prober.Update(targets)
	if c.Once {
		return c.once(ctx, out, prober)
	}
	s := &server{prober: prober, settings: settings}
	if c.TrenchFile != "" {
		// A refused file is reported, and read again when it changes.
		s.watcher = trenchfile.NewWatcher(c.TrenchFile, trench.DefaultDefaults(), config, settings.Log)
	}
	if err := c.feedback(s); err != nil {
		return err
	}
	settings.Log.Info("starting vipgate-probe", "version", settings.Version, "vips", len(targets))
	return cli.RunUntilStopped(0, func(stops <-chan struct{}) error { return s.run(ctx, stops) })
}

// configuration returns the trench file, or one with the VIPs of the flags.
func (c *runCommand) configuration() (*trench.Config, error) {
	if c.TrenchFile == "" {
		return nil, nil
	}
	config, err := trenchfile.Read(c.TrenchFile, trench.DefaultDefaults())
	if err != nil {
		return nil, cli.Usage("trench file refused:\n%w", err)
	}
	return config, nil
}

func (c *runCommand) targets(config *trench.Config) []probe.Target {
	if config != nil {
		return probe.Targets(config)
	}
	check, _ := parseCheck(c.Check) // refused by check
	return probe.List(c.VIP, check)
}

// parseCheck reads a check in the syntax of the trench file.
func parseCheck(text string) (trench.Check, error) {
	if text == "" {
		return trench.Check{}, errors.New("it is empty; write a check such as {tcp: {port: 5000}}")
	}
	var object any
	if err := yaml.Load([]byte(text), &object); err != nil {
		return trench.Check{}, fmt.Errorf("it is not YAML: %w", err)
	}
	fields := map[string]any{"check": object}
	var stream trench.Stream
	if problems := trenchfile.Decode(fields, &stream); len(problems) > 0 {
		return trench.Check{}, errors.New(problems[0].Message(func(path string) string { return path }))
	}
	return stream.Complete().Check, nil
}

// check refuses values that would fail later.
func (c *runCommand) check(r *cli.Refusals) {
	switch {
	case (c.TrenchFile == "") == (len(c.VIP) == 0):
		r.If(true, "no VIPs: write either --trench-file or --vip")
	case c.TrenchFile == "":
		_, err := parseCheck(c.Check)
		r.If(err != nil, "--check=%s: %w", c.Check, err)
	}
	const maxPorts = 64
	r.If(c.Ports < 1 || c.Ports > maxPorts, "--ports=%d: use 1 to %d", c.Ports, maxPorts)
	r.If(c.PortBase == 0 || int(c.PortBase)+c.Ports > 1<<16,
		"--port-base=%d: %d ports from there on exceed 65535, or it is 0", c.PortBase, c.Ports)
	r.If(c.Interval < 10*time.Millisecond, "--interval=%v: use at least 10ms", c.Interval)
	r.If(c.Timeout < time.Millisecond, "--timeout=%v: use at least 1ms", c.Timeout)
	r.If(c.Fall < 1, "--fall=%d: use at least 1", c.Fall)
	r.If(c.Rate < 1, "--rate=%d: use at least 1", c.Rate)
	for _, source := range c.Source {
		r.If(!source.IsValid() || source.Zone() != "" || source.Is4In6(),
			"--source=%v: write an address without a zone", source)
	}
	_, err := c.addresses()
	r.If(err != nil, "--lb=%w", err)
	if len(c.LB) > 0 {
		r.If(c.LBID.IsZero(), "--lb needs --lb-id, the SPIFFE ID of the load balancers")
		r.Add(c.Identity.Check(cli.DefaultProbeID, true))
	}
	c.Process.Check(r, cli.Port{})
}

// addresses returns the load balancers that get the verdicts.
func (c *runCommand) addresses() (all []registration.Address, err error) {
	for _, text := range c.LB {
		address, err := registration.ParseAddress(text)
		if err != nil {
			return nil, err
		}
		all = append(all, address)
	}
	return all, nil
}

// feedback returns the tasks that report verdicts; none without --lb.
func (c *runCommand) feedback(s *server) error {
	if len(c.LB) == 0 {
		return nil
	}
	source, err := c.Identity.Source(cli.DefaultProbeID, s.settings.Log)
	if err != nil {
		return cli.Usage("%w", err)
	}
	addresses, _ := c.addresses() // refused by check
	s.identity = source
	s.feed = feed.New(feed.Options{Prober: s.prober, LBs: addresses, Source: source, LB: c.LBID, Log: s.settings.Log})
	return nil
}

// once probes until every path has a verdict, and at most as long as that takes.
func (c *runCommand) once(ctx context.Context, out *cli.Output, prober *probe.Prober) error {
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- prober.Run(ctx) }()
	prober.Wait(ctx)
	report := prober.Report(time.Now())
	cancel()
	<-ended
	text, err := report.Table(), error(nil)
	if c.Output == "json" {
		text, err = report.JSON()
	}
	if err != nil {
		return err
	}
	out.Printf("%s", text)
	switch report.State() {
	case probe.Dead:
		return cli.ExitError(cli.ExitFailed)
	case probe.Unknown:
		return cli.ExitError(exitUnknown)
	}
	return nil
}

// server is a probe that runs.
type server struct {
	prober   *probe.Prober
	settings process.Settings
	watcher  *trenchfile.Watcher // nil without a trench file
	identity *identity.Source    // nil without --lb, as feed
	feed     *feed.Feed
	metrics  *metrics.Probe
	shell    *process.Process
}

func (s *server) run(ctx context.Context, stop <-chan struct{}) error {
	s.metrics = metrics.NewProbe(s.settings.Version, s.scrape)
	s.shell = process.New(s.settings, s.metrics)
	defer s.shell.Close()
	s.shell.Health.Report(liveness, "")
	s.shell.Health.Report(readiness, "no path was checked yet")
	s.shell.Health.Report(process.AdminSocket, "")
	if err := s.shell.Listen(ctx, process.Services{Admin: func(grpc.ServiceRegistrar) {}}); err != nil {
		return err
	}
	tasks := []task.Task{s.prober, observer{s}}
	if s.watcher != nil {
		tasks = append(tasks, s.watcher)
	}
	if s.feed != nil {
		tasks = append(tasks, s.identity, s.feed)
	}
	return s.shell.Run(ctx, stop, process.Plan{Stages: [][]task.Task{tasks}})
}

func (s *server) scrape() metrics.ProbeState {
	report := s.prober.Report(time.Now())
	state := metrics.ProbeState{Reachable: report.Reachable, Dead: report.Dead, Unknown: report.Unknown}
	if s.feed != nil {
		for _, lb := range s.feed.Status() {
			state.Reports = append(state.Reports, metrics.ProbeReports(lb))
		}
	}
	for _, v := range report.VIPs {
		probed := metrics.ProbedVIP{
			VIP: v.VIP.String(), Family: v.Family.String(), State: int(v.State), Latency: v.Latency,
		}
		for _, path := range v.Paths {
			if path.State == probe.Dead {
				probed.DeadPaths = append(probed.DeadPaths, metrics.DeadPath{Source: path.Source, LastHop: path.LastHop})
			}
		}
		state.VIPs = append(state.VIPs, probed)
	}
	return state
}

// observer follows the trench file and sets the health services. It implements task.Task.
type observer struct{ *server }

// String implements task.Task.
func (observer) String() string { return "observer" }

// Run observes until ctx ends.
func (o observer) Run(ctx context.Context) error {
	var loaded <-chan struct{}
	var generation uint64
	follow := func(first bool) {
		if o.watcher == nil {
			return
		}
		var now trench.Loaded
		now, loaded = o.watcher.Value().Get()
		o.metrics.Configuration(now.Err == nil && now.Generation > 0)
		if now.Generation != generation {
			generation = now.Generation
			o.prober.Update(probe.Targets(now.Config))
		}
		if !first {
			o.metrics.Reload(now.Err == nil)
		}
	}
	follow(true)
	ticker := time.NewTicker(time.Second)
	defer ticker.Stop()
	for {
		problem := ""
		if !o.prober.Complete(time.Now(), false) {
			problem = "a path has no recent verdict"
		}
		o.shell.Health.Report(readiness, problem)
		select {
		case <-loaded:
			follow(false)
		case <-ticker.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
