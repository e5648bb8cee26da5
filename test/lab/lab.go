package lab

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"golang.org/x/sys/unix"
)

// Addresses and names of the lab. They are the same in every lab: namespaces keep labs apart.
const (
	External = "ext-vlan" // the pod's interface toward the gateways
	Internal = "int0"     // the pod's interface toward the targets
	BGPPort  = 10179

	PodAS     = 8103
	GatewayAS = 4248829953
	// The second gateway has a different AS number. With the same one it would reject routes that
	// must not be sent to it, because its own AS is in the path, and the test would not notice the
	// advertisement. The number is from Meridio 2's samples, and is also the announcer's on the
	// loopback.
	GatewayBAS = 4200000000

	TrustDomain = "vipgate.demo"
	LBID        = "spiffe://vipgate.demo/lb"
	FrontendID  = "spiffe://vipgate.demo/frontend"
	OperatorID  = "spiffe://vipgate.demo/operator"
	// AppID is the SPIFFE ID of an application whose targets register themselves.
	AppID = "spiffe://vipgate.demo/ns/apps/sa/app"
)

// Addresses of the external network and of the targets' network.
var (
	PodExternal4  = netip.MustParseAddr("169.254.100.1")
	PodExternal6  = netip.MustParseAddr("fd00:100::1")
	GatewayA4     = netip.MustParseAddr("169.254.100.150")
	GatewayA6     = netip.MustParseAddr("fd00:100::150")
	GatewayB4     = netip.MustParseAddr("169.254.100.151")
	GatewayB6     = netip.MustParseAddr("fd00:100::151")
	Target1v4     = netip.MustParseAddr("172.16.1.1")
	Target1v6     = netip.MustParseAddr("fd00:16::1:1")
	Target2v4     = netip.MustParseAddr("172.16.1.2")
	Target2v6     = netip.MustParseAddr("fd00:16::1:2")
	podInternal   = []string{"172.16.0.1/16", "fd00:16::1/64"}
	externalBits4 = 24
	externalBits6 = 64
)

// tempDir contains the folders of labs: with a TMPDIR, the paths of unix sockets may be too
// long.
const tempDir = "/tmp"

// dirPattern matches the folders of labs: the owner's process ID and a random number.
var dirPattern = regexp.MustCompile(`^vg-([0-9]+)-[0-9]+$`)

// Lab is a trench pod's namespace, the gateways' namespace, the targets'
// namespace, and the wires between them.
type Lab struct {
	Dir     string // short, since paths of unix sockets end at 108 bytes
	Pod     *NetNS
	Gateway *NetNS
	Backend *NetNS
	Second  *NetNS // of a second gateway; nil before SecondGateway

	processes []*Process
	others    []*NetNS // of a Topology
	options   []Option // of pods
}

// New creates a lab without processes, after it has removed the remains of killed runs. The
// caller closes it.
func New(options ...Option) (*Lab, error) { return newLab((*Lab).wire, options) }

// newLab creates the namespaces of a lab and calls wire for the rest.
func newLab(wire func(*Lab) error, options []Option) (_ *Lab, err error) {
	if err := RemoveLeftovers(); err != nil {
		return nil, fmt.Errorf("leftovers of an earlier run: %w", err)
	}
	if err := removeFolders(); err != nil {
		return nil, fmt.Errorf("leftovers of an earlier run: %w", err)
	}
	dir, err := os.MkdirTemp(tempDir, fmt.Sprintf("vg-%d-", os.Getpid()))
	if err != nil {
		return nil, fmt.Errorf("folder of the lab: %w", err)
	}
	l := &Lab{Dir: dir, options: options}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.Close())
		}
	}()
	if l.Pod, err = Create(options...); err != nil {
		return nil, err
	}
	for _, ns := range []**NetNS{&l.Gateway, &l.Backend} {
		if *ns, err = Create(WithoutDAD); err != nil {
			return nil, err
		}
	}
	return l, wire(l)
}

// wire lays the wires and gives them addresses.
func (l *Lab) wire() error {
	return errors.Join(
		vethDown(l.Pod, External, l.Gateway, "trench0"), vethDown(l.Pod, Internal, l.Backend, "pod0"),
		l.upInPod(External, prefix(PodExternal4, externalBits4), prefix(PodExternal6, externalBits6)),
		l.upInPod(Internal, podInternal...),
		l.Pod.awaitDAD(External), l.Pod.awaitDAD(Internal),
		l.Gateway.Addr("trench0", prefix(GatewayA4, externalBits4), prefix(GatewayA6, externalBits6)),
		l.Backend.Addr("pod0", prefix(Target1v4, 16), prefix(Target2v4, 16), prefix(Target1v6, 64),
			prefix(Target2v6, 64)),
		l.Pod.Sysctl("net.ipv4.ip_forward", "1"),
		l.Pod.Sysctl("net.ipv6.conf.all.forwarding", "1"),
		// With strict reverse path filtering, the default of some hosts, IPv4 VIPs would be withdrawn.
		l.Pod.Sysctl("net.ipv4.conf.all.rp_filter", "0"), l.Pod.Sysctl("net.ipv4.conf."+External+".rp_filter", "0"),
		l.Gateway.Sysctl("net.ipv4.ip_forward", "1"),
		l.Gateway.Sysctl("net.ipv6.conf.all.forwarding", "1"),
	)
}

// upInPod sets an interface of the pod up, and gives it addresses.
func (l *Lab) upInPod(dev string, prefixes ...string) error {
	lines := []string{"link set " + dev + " up"}
	for _, p := range prefixes {
		lines = append(lines, "addr add "+p+" dev "+dev)
	}
	return errors.Join(l.Pod.shortenDAD(dev), l.Pod.Batch(lines...))
}

func prefix(a netip.Addr, bits int) string { return netip.PrefixFrom(a, bits).String() }

// Start starts a process in the pod; Close ends it.
func (l *Lab) Start(ns *NetNS, name string, args ...string) (*Process, error) {
	return l.startIn(l.Dir, ns, name, args...)
}

// startIn is Start with a folder for the process and its output.
func (l *Lab) startIn(dir string, ns *NetNS, name string, args ...string) (*Process, error) {
	p, err := StartProcess(ns, dir, name, args...)
	if err == nil {
		l.processes = append(l.processes, p)
	}
	return p, err
}

// StartGateway starts the BIRD gateway; Close ends it.
func (l *Lab) StartGateway(c GatewayConfig) (*Gateway, error) {
	g, err := StartGateway(l.Gateway, l.Dir, c)
	if err == nil {
		l.processes = append(l.processes, g.Process)
	}
	return g, err
}

// GatewayA returns the configuration of the usual gateway: eBGP, dual stack, default routes.
func GatewayA() GatewayConfig {
	return GatewayConfig{
		Name: "gateway-a", RouterID: GatewayA4, LocalAS: GatewayAS, RemoteAS: PodAS, Port: BGPPort,
		Local: []netip.Addr{GatewayA4, GatewayA6}, Peers: []netip.Addr{PodExternal4, PodExternal6},
		Default: true,
	}
}

// GatewayB returns the configuration of a second gateway. It differs from GatewayA in the AS
// number and in the addresses, which SecondGateway gives to a namespace.
func GatewayB() GatewayConfig {
	c := GatewayA()
	c.Name, c.RouterID, c.LocalAS, c.Local = "gateway-b", GatewayB4, GatewayBAS, []netip.Addr{GatewayB4, GatewayB6}
	return c
}

// ExternalSubnets returns the subnets in which pods have their external addresses.
func ExternalSubnets() []netip.Prefix {
	return []netip.Prefix{netip.PrefixFrom(PodExternal4, 24).Masked(), netip.PrefixFrom(PodExternal6, 64).Masked()}
}

// SecondGateway creates the namespace of a second gateway on the pod's external link, with the
// addresses of GatewayB, unless it exists. Its interface is also named trench0. Its link can
// fail alone; it depends on the first gateway's trench0, which is its lower device.
func (l *Lab) SecondGateway() (*NetNS, error) {
	if l.Second != nil {
		return l.Second, nil
	}
	ns, err := Create(WithoutDAD)
	if err != nil {
		return nil, err
	}
	l.Second = ns
	return ns, errors.Join(
		l.Gateway.IP(
			"link", "add", "link", "trench0", "name", "trench0", "netns", ns.name, "type", "macvlan", "mode", "bridge",
		),
		ns.IP("link", "set", "trench0", "up"),
		ns.Addr("trench0", prefix(GatewayB4, externalBits4), prefix(GatewayB6, externalBits6)),
		ns.Sysctl("net.ipv4.ip_forward", "1"),
		ns.Sysctl("net.ipv6.conf.all.forwarding", "1"),
	)
}

// Close ends every process and removes every namespace and file. It can be
// called twice.
func (l *Lab) Close() error {
	var errs []error
	for _, p := range l.processes {
		errs = append(errs, p.Kill())
	}
	l.processes = nil
	for _, ns := range []**NetNS{&l.Pod, &l.Second, &l.Gateway, &l.Backend} {
		if *ns != nil {
			// BIRD is a child of the frontend, not of the lab: endProcesses kills processes that outlived
			// their parent in the pod.
			(*ns).endProcesses()
			errs = append(errs, (*ns).Close())
			*ns = nil
		}
	}
	for _, ns := range l.others {
		ns.endProcesses()
		errs = append(errs, ns.Close())
	}
	l.others = nil
	return errors.Join(append(errs, os.RemoveAll(l.Dir))...)
}

// unmountIn detaches what a killed run left mounted in a directory: a file system in user space whose
// server has ended prevents the removal.
func unmountIn(dir string) error {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	var errs []error
	for line := range strings.Lines(string(mounts)) {
		const point = 4 // of proc_pid_mountinfo(5), from 0
		if fields := strings.Fields(line); len(fields) > point && strings.HasPrefix(fields[point], dir+"/") {
			if err := unix.Unmount(fields[point], unix.MNT_DETACH); err != nil {
				errs = append(errs, fmt.Errorf("unmount %s: %w", fields[point], err))
			}
		}
	}
	return errors.Join(errs...)
}

// removeFolders removes the directories of labs whose owners have ended.
func removeFolders() error {
	entries, err := os.ReadDir(tempDir)
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		m := dirPattern.FindStringSubmatch(e.Name())
		if m == nil {
			continue
		}
		if info, err := e.Info(); err == nil && !OwnerRuns(m[1], info.ModTime()) {
			dir := filepath.Join(tempDir, e.Name())
			errs = append(errs, unmountIn(dir), os.RemoveAll(dir))
		}
	}
	return errors.Join(errs...)
}
