package quickstart

import (
	"context"
	_ "embed" // files of the laboratory
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/vipgate/vipgate/pkg/durable"
)

// Names that the documents have, too.
const (
	folder = "/run/vipgate-quickstart"
	// prefix begins the names of all namespaces.
	prefix = "vipgate-"
	// dropIn moves the units of the package into the pod's namespace. It does not survive a reboot,
	// and neither do the namespaces.
	dropIn = "/run/systemd/system/vipgate-%s.service.d/quickstart.conf"
)

var (
	//go:embed trench.yaml
	trenchFile []byte
	//go:embed bird.conf
	birdConfig string
	// environment is for the shells in which lb and frontend start.
	//go:embed env
	environment []byte
	// podSettings sets the kernel parameters of the pod.
	//go:embed pod.sh
	podSettings string
)

// node is a namespace and its interface in a network.
type node struct {
	name, network, device string
	addresses             []string
}

const podName = "pod"

// The pod has one node for each of its networks.
var nodes = []node{
	{podName, "external", "ext-vlan", []string{"169.254.100.1/24", "fd00:100::1/64"}},
	{podName, "targets", "targets", []string{"172.16.0.1/16", "fd00:16::1/64"}},
	{"gateway-a-1", "external", "ext-vlan", []string{"169.254.100.150/24"}},
	{"gateway-a-2", "external", "ext-vlan", []string{"fd00:100::150/64"}},
	{"target-1", "targets", "targets", []string{"172.16.1.1/16", "fd00:16::1:1/64"}},
	{"target-2", "targets", "targets", []string{"172.16.1.2/16", "fd00:16::1:2/64"}},
}

// switchName is the namespace with a bridge for each network.
const switchName = "network"

// namespaces lists the names without prefix, the switch first: it creates the interfaces of all.
func namespaces() []string {
	names := []string{switchName}
	for _, n := range nodes {
		names = append(names, n.name)
	}
	return slices.Compact(names)
}

// up creates the laboratory and returns when gateways and targets run.
func up(ctx context.Context) error {
	// Debian keeps BIRD out of a user's PATH.
	if err := os.Setenv("PATH", os.Getenv("PATH")+":/usr/sbin:/sbin"); err != nil {
		return err
	}
	for _, program := range []string{"ip", "bird", "birdc"} {
		if _, err := exec.LookPath(program); err != nil {
			return fmt.Errorf("%s is not installed; run apt-get install bird2 iproute2", program)
		}
	}
	if err := down(ctx); err != nil {
		return err
	}
	if err := os.Mkdir(folder, 0o755); err != nil {
		return err
	}
	if err := network(ctx); err != nil {
		return err
	}
	for _, n := range nodes {
		var err error
		switch kind, _, _ := strings.Cut(n.name, "-"); kind {
		case "gateway":
			err = startGateway(ctx, n)
		case "target":
			err = startTarget(ctx, n)
		}
		if err != nil {
			return err
		}
	}
	return errors.Join(write("trench.yaml", trenchFile), write("env", environment), isolateUnits(ctx))
}

func write(name string, data []byte) error {
	return durable.Replace(filepath.Join(folder, name), data, 0o644)
}

// network creates the namespaces and connects them by two bridges.
func network(ctx context.Context) error {
	lines := map[string][]string{switchName: {"link set lo up"}}
	for _, name := range namespaces() {
		if err := run(ctx, "ip", "netns", "add", prefix+name); err != nil {
			return err
		}
	}
	for _, bridge := range []string{"external", "targets"} {
		lines[switchName] = append(lines[switchName], "link add "+bridge+" type bridge", "link set "+bridge+" up")
	}
	for i, n := range nodes {
		port := fmt.Sprintf("port%d", i)
		lines[switchName] = append(lines[switchName],
			"link add "+port+" type veth peer name "+n.device+" netns "+prefix+n.name,
			"link set "+port+" master "+n.network+" up")
		lines[n.name] = append(lines[n.name], "link set lo up", "link set "+n.device+" up")
		for _, address := range n.addresses {
			// The addresses are unique: without detection of duplicates they are usable immediately.
			suffix := ""
			if strings.Contains(address, ":") {
				suffix = " nodad"
			}
			lines[n.name] = append(lines[n.name], "addr add "+address+" dev "+n.device+suffix)
		}
		if strings.HasPrefix(n.name, "target-") {
			lines[n.name] = append(lines[n.name], "addr add 20.0.0.1/32 dev lo", "addr add 2000::1/128 dev lo nodad",
				"route add default via 172.16.0.1", "route add default via fd00:16::1")
		}
	}
	if err := run(ctx, "ip", "netns", "exec", prefix+podName, "sh", "-ec", podSettings); err != nil {
		return err
	}
	for _, name := range namespaces() {
		if err := batch(ctx, name, lines[name]); err != nil {
			return err
		}
	}
	return nil
}

// batch runs commands of ip in a namespace.
func batch(ctx context.Context, name string, lines []string) error {
	cmd := exec.CommandContext(ctx, "ip", "-n", prefix+name, "-batch", "-")
	cmd.Stdin = strings.NewReader(strings.Join(lines, "\n"))
	return output(cmd)
}

// startGateway starts BIRD, which leaves the command's session by itself.
func startGateway(ctx context.Context, n node) error {
	address, _, _ := strings.Cut(n.addresses[0], "/")
	family, route, peer, id := "ipv4", "0.0.0.0/0", "169.254.100.1", address
	if strings.Contains(address, ":") {
		family, route, peer, id = "ipv6", "::/0", "fd00:100::1", "169.254.100.151"
	}
	config := fmt.Sprintf(birdConfig, id, family, route, address, peer)
	if err := write(n.name+".conf", []byte(config)); err != nil {
		return err
	}
	file := filepath.Join(folder, n.name)
	return run(ctx, "ip", "netns", "exec", prefix+n.name, "bird", "-c", file+".conf", "-s", file+".ctl", "-P",
		file+".pid", "-D", file+".log")
}

// startTarget starts this program as the application of a target, in a session of its own.
func startTarget(_ context.Context, n node) error {
	program, err := os.Executable()
	if err != nil {
		return err
	}
	log, err := os.Create(filepath.Join(folder, n.name+".log"))
	if err != nil {
		return err
	}
	defer log.Close()
	// The context would end the application with the command.
	cmd := exec.Command("ip", "netns", "exec", prefix+n.name, program, "quickstart", "--serve="+n.name)
	cmd.Stdout, cmd.Stderr, cmd.Dir = log, log, "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("application of %s: %w", n.name, err)
	}
	return cmd.Process.Release()
}

// isolateUnits makes the units of the package start in the pod's namespace, if systemd runs.
func isolateUnits(ctx context.Context) error {
	if _, err := os.Stat("/run/systemd/system"); err != nil {
		return nil //nolint:nilerr // no systemd, no units
	}
	for _, program := range []string{"lb", "frontend"} {
		file := fmt.Sprintf(dropIn, program)
		text := "[Service]\nNetworkNamespacePath=/run/netns/" + prefix + podName + "\n"
		err := os.MkdirAll(filepath.Dir(file), 0o755)
		if err == nil {
			err = os.WriteFile(file, []byte(text), 0o644)
		}
		if err != nil {
			return err
		}
	}
	return run(ctx, "systemctl", "daemon-reload")
}

// down removes every process, namespace and file of a laboratory, also an incomplete one.
func down(ctx context.Context) error {
	if err := releaseUnits(ctx); err != nil {
		return err
	}
	for _, name := range namespaces() {
		path := "/run/netns/" + prefix + name
		if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err := killAll(ctx, prefix+name); err != nil {
			return err
		}
		if err := run(ctx, "ip", "netns", "delete", prefix+name); err != nil {
			return err
		}
	}
	return os.RemoveAll(folder)
}

// releaseUnits stops the units before their namespace ends: they must not restart in the host's.
func releaseUnits(ctx context.Context) error {
	found := false
	for _, program := range []string{"frontend", "lb"} {
		file := fmt.Sprintf(dropIn, program)
		if _, err := os.Stat(file); err != nil {
			continue
		}
		found = true
		// A pattern matches no unit, without an error, where the package is not installed.
		if err := run(ctx, "systemctl", "stop", "vipgate-"+program+".*"); err != nil {
			return err
		}
		if err := os.RemoveAll(filepath.Dir(file)); err != nil {
			return err
		}
	}
	if !found {
		return nil
	}
	return run(ctx, "systemctl", "daemon-reload")
}

// killAll ends all processes of a namespace, also those that the user started: they would keep it.
func killAll(ctx context.Context, namespace string) error {
	for {
		cmd := exec.CommandContext(ctx, "ip", "netns", "pids", namespace)
		out, err := cmd.Output()
		if err != nil {
			return fmt.Errorf("processes of %s: %w", namespace, err)
		}
		pids := strings.Fields(string(out))
		if len(pids) == 0 {
			return nil
		}
		for _, pid := range pids {
			var number int
			if _, err := fmt.Sscan(pid, &number); err != nil || number <= 1 {
				return fmt.Errorf("processes of %s: %q", namespace, pid)
			}
			if err := syscall.Kill(number, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
				return fmt.Errorf("process %d of %s: %w", number, namespace, err)
			}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("processes of %s do not end: %w", namespace, ctx.Err())
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func run(ctx context.Context, args ...string) error {
	return output(exec.CommandContext(ctx, args[0], args[1:]...))
}

// output adds the output of a failed command to its error.
func output(cmd *exec.Cmd) error {
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", strings.Join(cmd.Args, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}
