package kubernetes

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/test/lab"
)

// tempDir is the parent of the clusters' folders: TMPDIR may be too long for the paths of unix
// sockets.
const tempDir = "/tmp"

// dirPattern matches the folders of clusters: the owner's process ID and a random number.
var dirPattern = regexp.MustCompile(`^vk-([0-9]+)-[0-9]+$`)

// process is a process whose working directory is the folder of a cluster; removeLeftovers finds
// it by this directory.
type process struct {
	name string
	log  string
	cmd  *exec.Cmd
	done chan struct{} // closed when the process has ended
}

// startProcess starts a program in dir with its output in dir/name.log.
func startProcess(dir, name string, args ...string) (*process, error) {
	p := &process{name: name, log: filepath.Join(dir, name+".log"), done: make(chan struct{})}
	out, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("log of %s: %w", name, err)
	}
	defer out.Close()
	p.cmd = exec.Command(args[0], args[1:]...)
	p.cmd.Dir, p.cmd.Stdout, p.cmd.Stderr = dir, out, out
	p.cmd.Env = []string{"HOME=" + dir, "PATH=" + os.Getenv("PATH")} // no settings of the user, such as ETCD_NAME
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	go func() {
		_ = p.cmd.Wait() // a killed process has no exit status of interest
		close(p.done)
	}()
	return p, nil
}

// ready waits until check returns nil. It fails when the process ends or startTimeout expires.
func (p *process) ready(check func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		err := check(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-p.done:
			return fmt.Errorf("%s ended: %s", p.name, p.tail())
		case <-ctx.Done():
			return fmt.Errorf("%s is not ready after %v: %w: %s", p.name, startTimeout, err, p.tail())
		case <-tick.C:
		}
	}
}

// tail returns the end of the process's log.
func (p *process) tail() string {
	const lines = 15
	b, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	all := strings.Split(strings.TrimSpace(string(b)), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

// kill ends the process group and waits for the process. A process that was never started is not
// an error.
func (p *process) kill() error {
	if p == nil {
		return nil
	}
	if err := unix.Kill(-p.cmd.Process.Pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("kill %s: %w", p.name, err)
	}
	<-p.done // SIGKILL cannot be ignored
	return nil
}

// removeLeftovers ends the processes and removes the folders of clusters whose owners have ended.
func removeLeftovers() error {
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
		if info, err := e.Info(); err != nil || lab.OwnerRuns(m[1], info.ModTime()) {
			continue
		}
		dir := filepath.Join(tempDir, e.Name())
		errs = append(errs, endProcesses(dir), os.RemoveAll(dir))
	}
	return errors.Join(errs...)
}

// endProcesses kills the process groups whose working directory is dir, and waits for their end.
func endProcesses(dir string) error {
	deadline := time.Now().Add(startTimeout)
	for {
		pids, err := processesIn(dir)
		if err != nil || len(pids) == 0 {
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("processes %v in %s do not end", pids, dir)
		}
		for _, pid := range pids {
			_ = unix.Kill(-pid, unix.SIGKILL) // it may have ended
		}
		time.Sleep(pollInterval)
	}
}

// processesIn returns the processes whose working directory is dir; zombies have none.
func processesIn(dir string) ([]int, error) {
	links, err := filepath.Glob("/proc/[0-9]*/cwd")
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, link := range links {
		at, err := os.Readlink(link)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) || at != dir {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(link)))
		if err != nil {
			return nil, err
		}
		pids = append(pids, pid)
	}
	return pids, nil
}
