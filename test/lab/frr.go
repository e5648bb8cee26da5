package lab

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// frrFolder is where Debian keeps FRR's daemons.
const frrFolder = "/usr/lib/frr"

// frrDaemons are the daemons of a gateway, in the order in which they start:
// zebra provides the interfaces to the other daemons.
var frrDaemons = []string{"zebra", "bfdd", "bgpd"}

// FRR is an FRR (zebra, bfdd, bgpd) that plays the external router. Its daemons
// run as the user that the package created for them.
type FRR struct {
	GatewayConfig
	NS *NetNS

	dir     string
	daemons map[string]*Process
}

// MissingForFRR returns the program that this machine lacks for an FRR gateway, or "".
func MissingForFRR() string {
	if _, err := os.Stat(filepath.Join(frrFolder, "bgpd")); err != nil {
		return "FRR (Debian: apt-get install frr)"
	}
	return ""
}

// StartFRR starts FRR in a namespace with its files in a folder in dir, for which every user
// needs search permission. If it returns both a gateway and an error, some daemons may run.
func StartFRR(ns *NetNS, dir string, c GatewayConfig) (*FRR, error) {
	g := &FRR{GatewayConfig: c, NS: ns, dir: filepath.Join(dir, c.Name), daemons: map[string]*Process{}}
	if err := g.makeFolder(); err != nil {
		return nil, fmt.Errorf("gateway %s: %w", c.Name, err)
	}
	return g, g.Start()
}

// makeFolder creates the folder of sockets and pid files, owned by FRR's user.
func (g *FRR) makeFolder() error {
	if err := os.MkdirAll(g.dir, 0o700); err != nil {
		return err
	}
	frr, err := user.Lookup("frr")
	if err != nil {
		return err
	}
	uid, errUID := strconv.Atoi(frr.Uid)
	gid, errGID := strconv.Atoi(frr.Gid)
	if err := errors.Join(errUID, errGID); err != nil {
		return err
	}
	return os.Chown(g.dir, uid, gid)
}

// Config returns the configuration with which the gateway was started.
func (g *FRR) Config() GatewayConfig { return g.GatewayConfig }

// Processes returns the daemons, including ended ones.
func (g *FRR) Processes() []*Process {
	var all []*Process
	for _, name := range frrDaemons {
		if p := g.daemons[name]; p != nil {
			all = append(all, p)
		}
	}
	return all
}

// Daemon returns zebra, bfdd or bgpd; nil before its first start.
func (g *FRR) Daemon(name string) *Process { return g.daemons[name] }

// Start starts every daemon that does not run and gives it the configuration, as
// Debian's start script does.
func (g *FRR) Start() error {
	for _, name := range frrDaemons {
		if name == "bfdd" && !g.BFD || running(g.daemons[name]) {
			continue
		}
		if err := g.StartDaemon(name); err != nil {
			return err
		}
	}
	return nil
}

// Stop ends every daemon as an init system does, the last one started first, and
// waits for their ends.
func (g *FRR) Stop(ctx context.Context) error {
	for i := len(frrDaemons) - 1; i >= 0; i-- {
		p := g.daemons[frrDaemons[i]]
		if !running(p) {
			continue
		}
		if err := p.Signal(unix.SIGTERM); err != nil {
			return err
		}
		if _, err := p.Wait(ctx); err != nil {
			return err
		}
	}
	return nil
}

// StartDaemon starts one daemon and gives it the configuration.
func (g *FRR) StartDaemon(name string) error {
	if err := g.startDaemon(name); err != nil {
		return fmt.Errorf("%s of gateway %s: %w", name, g.Name, err)
	}
	return nil
}

func (g *FRR) startDaemon(name string) error {
	args, err := g.configure()
	if err != nil {
		return err
	}
	return g.runDaemon(name, args)
}

// runDaemon starts a daemon, bgpd with further arguments, and gives it the configuration.
func (g *FRR) runDaemon(name string, args []string) error {
	// A killed daemon does not remove its control socket.
	control := filepath.Join(g.dir, name+".vty")
	if err := os.Remove(control); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	command := []string{
		filepath.Join(frrFolder, name), "--vty_socket", g.dir, "-z", filepath.Join(g.dir, "zserv.api"),
		"-i", filepath.Join(g.dir, name+".pid"), "-f", os.DevNull, "-P", "0", "--log", "stdout", "--log-level", "debug",
	}
	switch name {
	case "bgpd":
		command = append(command, args...)
	case "bfdd":
		command = append(command, "--bfdctl", filepath.Join(g.dir, "bfdd.sock"))
	}
	p, err := StartProcess(g.NS, g.dir, name, command...)
	if err != nil {
		return err
	}
	g.daemons[name] = p
	ctx, cancel := context.WithTimeout(context.Background(), commandTimeout)
	defer cancel()
	// A daemon opens its control socket last: only then zebra accepts clients, which would retry
	// after 10 s only.
	err = Eventually(ctx, 5*time.Millisecond, func() error {
		if !running(p) {
			return fmt.Errorf("it ended: %s", p.Tail(5))
		}
		_, err := g.vtysh(ctx, "-d", name, "-c", "show version")
		return err
	})
	if err != nil {
		return err
	}
	// Exactly once, as at FRR's start: a second load would hide statements in the wrong order.
	_, err = g.vtysh(ctx, "-b", "-d", name)
	return err
}

// bgpdOptions finds the options of bgpd in the comments of frr.conf.
var bgpdOptions = regexp.MustCompile(`(?m)^! bgpd_options="(.*)"$`)

// configure writes FRR's files and returns the arguments for bgpd.
func (g *FRR) configure() ([]string, error) {
	text, err := g.text("frr")
	if err != nil {
		return nil, err
	}
	if len(g.GatewayConfig.Routes) > 0 {
		text = strings.Replace(text, "\n bgp log-neighbor-changes\n",
			"\n bgp log-neighbor-changes\n no bgp network import-check\n", 1)
	}
	options := bgpdOptions.FindStringSubmatch(text)
	if options == nil {
		return nil, errors.New("frr.conf names no bgpd_options")
	}
	text = "log timestamp precision 6\ndebug bgp updates in\n" + text
	return strings.Fields(options[1]), g.write(text)
}

// write writes frr.conf.
func (g *FRR) write(text string) error {
	return errors.Join(os.WriteFile(filepath.Join(g.dir, "frr.conf"), []byte(text), 0o600),
		os.WriteFile(filepath.Join(g.dir, "vtysh.conf"), nil, 0o600))
}

// vtysh runs FRR's shell, which shares no code with the tests.
func (g *FRR) vtysh(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "vtysh", append([]string{"--vty_socket", g.dir, "--config_dir", g.dir}, args...)...)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("vtysh %s on gateway %s: %w: %s%s", strings.Join(args, " "), g.Name, err, stderr.String(),
			out)
	}
	return string(out), nil
}

// Command runs a vtysh command of the gateway's bgpd.
func (g *FRR) Command(ctx context.Context, command string) (string, error) {
	return g.vtysh(ctx, "-d", "bgpd", "-c", command)
}

// Reset ends every session with a NOTIFICATION.
func (g *FRR) Reset(ctx context.Context) error {
	_, err := g.Command(ctx, "clear bgp *")
	return err
}

// frrPath is one path of `show bgp … json detail`. The first element of each
// list describes the prefix and has none of these.
type frrPath struct {
	ASPath *struct {
		Text string `json:"string"`
	} `json:"aspath"`
	LocalPref *uint32 `json:"locPrf"`
	BestPath  struct {
		Overall bool `json:"overall"`
	} `json:"bestpath"`
	Community struct {
		Text string `json:"string"`
	} `json:"community"`
	LargeCommunity struct {
		Text string `json:"string"`
	} `json:"largeCommunity"`
	ExtendedCommunity struct {
		Text string `json:"string"`
	} `json:"extendedCommunity"`
	MED      *uint32 `json:"metric"`
	NextHops []struct {
		IP netip.Addr `json:"ip"`
	} `json:"nexthops"`
	// Sourced is true for routes that bgpd itself originates.
	Sourced bool `json:"sourced"`
}

// Routes returns the routes learned over BGP, by prefix: of several routes to one prefix, the
// best one.
func (g *FRR) Routes(ctx context.Context) (map[netip.Prefix]Route, error) {
	routes := map[netip.Prefix]Route{}
	for _, family := range []string{"ipv4", "ipv6"} {
		out, err := g.Command(ctx, "show bgp "+family+" unicast json detail")
		if err != nil {
			return nil, err
		}
		if err := parseFRRRoutes(out, routes); err != nil {
			return nil, fmt.Errorf("routes of gateway %s: %w", g.Name, err)
		}
	}
	return routes, nil
}

// parseFRRRoutes reads FRR's `show bgp … json detail`.
func parseFRRRoutes(out string, routes map[netip.Prefix]Route) error {
	var table struct {
		Routes map[netip.Prefix][]frrPath `json:"routes"`
	}
	if err := json.Unmarshal([]byte(out), &table); err != nil {
		return err
	}
	for prefix, paths := range table.Routes {
		for _, p := range paths {
			if !p.BestPath.Overall || p.ASPath == nil || p.Sourced {
				continue // not a path, not the best one, or originated here
			}
			r := Route{Prefix: prefix, Communities: frrCommunities(p.Community.Text), Bandwidth: p.ExtendedCommunity.Text}
			if p.ASPath.Text != "Local" {
				r.ASPath = strings.Fields(p.ASPath.Text)
			}
			if p.LocalPref != nil {
				r.LocalPref = strconv.FormatUint(uint64(*p.LocalPref), 10)
			}
			r.Communities = append(r.Communities, frrCommunities(p.LargeCommunity.Text)...)
			if p.MED != nil {
				r.MED = strconv.FormatUint(uint64(*p.MED), 10)
			}
			if len(p.NextHops) > 0 {
				r.NextHop = p.NextHops[0].IP
			}
			routes[prefix] = r
		}
	}
	return nil
}

// frrCommunities returns the communities in BIRD's form. FRR shows names for some of them.
func frrCommunities(text string) []string {
	var all []string
	for _, word := range strings.Fields(text) {
		if word == "graceful-shutdown" {
			word = "65535:0"
		}
		if strings.Contains(word, ":") {
			word = "(" + strings.ReplaceAll(word, ":", ",") + ")"
		}
		all = append(all, word)
	}
	return all
}

// WantRoutes waits until exactly these prefixes are in the gateway's table.
func (g *FRR) WantRoutes(ctx context.Context, prefixes ...string) error {
	return wantRoutes(ctx, g, prefixes)
}

// Trace returns every update that the gateway received so far, in order and without
// gaps.
func (g *FRR) Trace() ([]RouteUpdate, error) {
	return readTrace(g.Name, filepath.Join(g.dir, "bgpd.log"), parseFRRTrace)
}

// frrTime is FRR's time stamp; a fraction may follow.
const frrTime = "2006/01/02 15:04:05"

// Lines of bgpd's log, after date, time, daemon and number of the message.
var (
	frrAttributes = regexp.MustCompile(`^([0-9a-f.:]+)\(\S*\) rcvd UPDATE w/ attr: (.*)$`)
	frrAnnounced  = regexp.MustCompile(`^([0-9a-f.:]+)\(\S*\) rcvd ([0-9a-f.:]+/[0-9]+) IPv[46] unicast`)
	frrWithdrawn  = regexp.MustCompile(`^([0-9a-f.:]+)\(\S*\) rcvd UPDATE about ` +
		`([0-9a-f.:]+/[0-9]+) IPv[46] unicast -- withdrawn`)
	frrDown = regexp.MustCompile(`^%ADJCHANGE: neighbor ([0-9a-f.:]+)\(\S*\) in vrf default Down`)
)

// parseFRRTrace reads bgpd's log, where these lines report received updates, each
// after DATE TIME BGP: [number]:
//
//	169.254.100.1(Unknown) rcvd UPDATE w/ attr: nexthop 169.254.100.1, origin i, community graceful-shutdown, path 8103
//	169.254.100.1(Unknown) rcvd 20.0.0.1/32 IPv4 unicast
//	169.254.100.1(Unknown) rcvd UPDATE about 20.0.0.1/32 IPv4 unicast -- withdrawn
//	%ADJCHANGE: neighbor 169.254.100.1(Unknown) in vrf default Down BGP Notification received
func parseFRRTrace(log string) ([]RouteUpdate, error) {
	var trace []RouteUpdate
	attributes := map[string]RouteUpdate{} // of the UPDATE that a neighbor is sending
	held := adjRIBIn{}
	for line := range strings.Lines(log) {
		line, whole := strings.CutSuffix(line, "\n")
		words := strings.SplitN(line, " ", 5)
		if !whole || len(words) < 5 || words[2] != "BGP:" {
			continue // still being written, or a line of another format
		}
		at, err := time.ParseInLocation(frrTime, words[0]+" "+words[1], time.Local)
		if err != nil {
			return nil, fmt.Errorf("line %q of bgpd's log: %w", line, err)
		}
		said := words[4]
		if m := frrAttributes.FindStringSubmatch(said); m != nil {
			attributes[m[1]] = parseFRRUpdate(m[2])
		} else if m := frrAnnounced.FindStringSubmatch(said); m != nil {
			u := attributes[m[1]]
			u.At = at
			if u.Prefix, err = netip.ParsePrefix(m[2]); err != nil {
				return nil, fmt.Errorf("line %q of bgpd's log: %w", line, err)
			}
			trace = append(trace, held.announce(m[1], u))
		} else if m := frrWithdrawn.FindStringSubmatch(said); m != nil {
			p, err := netip.ParsePrefix(m[2])
			if err != nil {
				return nil, fmt.Errorf("line %q of bgpd's log: %w", line, err)
			}
			trace = append(trace, held.withdraw(m[1], at, p)...)
		} else if m := frrDown.FindStringSubmatch(said); m != nil {
			trace = append(trace, held.down(m[1], at)...)
		} else if strings.HasPrefix(said, "bgpd ") && strings.Contains(said, " starting:") {
			clear(held) // a new process has no routes
		}
	}
	return trace, nil
}

// parseFRRUpdate reads the attributes of an UPDATE.
func parseFRRUpdate(attributes string) RouteUpdate {
	var u RouteUpdate
	for part := range strings.SplitSeq(attributes, ", ") {
		name, value, _ := strings.Cut(part, " ")
		switch name {
		case "path":
			u.ASPath = strings.Fields(value)
		case "community":
			u.Communities = frrCommunities(value)
		}
	}
	return u
}
