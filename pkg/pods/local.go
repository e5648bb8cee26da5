package pods

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"
)

// Machine is the source of pods without Kubernetes: the admin sockets below a folder, such as
// /run/vipgate/lb.sock of one trench, or /run/vipgate/NAME/lb.sock of several network namespaces.
type Machine struct {
	Dir string
}

// Members lists the folder itself, if it has sockets, or its folders.
func (m Machine) Members(context.Context) ([]Member, error) {
	var members []Member
	// An end of a program removes its socket. The pod is listed while the folder has another one.
	for _, pattern := range []string{"*.sock", "*/*.sock"} {
		sockets, err := filepath.Glob(filepath.Join(m.Dir, pattern))
		if err != nil {
			return nil, fmt.Errorf("failed to find admin sockets: %w", err)
		}
		for _, socket := range sockets {
			name := filepath.Base(filepath.Dir(socket))
			if program := filepath.Base(socket); program != Frontend+".sock" && program != LB+".sock" ||
				len(members) > 0 && members[len(members)-1].Name == name {
				continue
			}
			members = append(members, Member{Name: name, Programs: map[string]string{Frontend: "", LB: ""}})
		}
		if len(members) > 0 {
			return members, nil
		}
	}
	return nil, fmt.Errorf("no admin socket in %s: frontend.sock, lb.sock or NAME/frontend.sock, NAME/lb.sock", m.Dir)
}

// Run runs a command on this machine with the admin socket of a program. The programs are in the
// folder of this one, or in $PATH.
func (m Machine) Run(ctx context.Context, pod, program string, command []string, stdout io.Writer) error {
	dir := m.Dir
	if pod != filepath.Base(dir) {
		dir = filepath.Join(dir, pod)
	}
	path := command[0]
	if self, err := os.Executable(); err == nil {
		if neighbor := filepath.Join(filepath.Dir(self), path); isFile(neighbor) {
			path = neighbor
		}
	}
	socket := filepath.Join(dir, program+".sock")
	line := append([]string{path}, command[1:]...)
	if slices.Contains(command, kernelDump) {
		line = append(enter(ctx, socket), line...)
	}
	var stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, line[0], line[1:]...)
	cmd.Env = append(os.Environ(), "VIPGATE_ADMIN_SOCKET=unix://"+socket)
	cmd.Stdout, cmd.Stderr = stdout, &stderr
	err := cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return &ExitError{Status: exit.ExitCode(), Stderr: stderr.String()}
	}
	if err != nil {
		return fmt.Errorf("failed to run %s: %w", path, err)
	}
	return nil
}

// enter returns the command line that runs a command in the network namespace of the process that
// listens on a socket; empty if it is this namespace, or the process does not answer.
func enter(ctx context.Context, socket string) []string {
	conn, err := new(net.Dialer).DialContext(ctx, "unix", socket)
	if err != nil {
		return nil
	}
	defer conn.Close()
	raw, err := conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		return nil
	}
	var peer *unix.Ucred
	_ = raw.Control(func(fd uintptr) { // fails for a closed socket
		peer, _ = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) // nil with an error
	})
	if peer == nil {
		return nil
	}
	namespace := fmt.Sprintf("/proc/%d/ns/net", peer.Pid)
	own, _ := os.Readlink("/proc/self/ns/net")
	if its, err := os.Readlink(namespace); err != nil || its == own {
		return nil
	}
	return []string{"nsenter", "--net=" + namespace}
}

func isFile(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular()
}
