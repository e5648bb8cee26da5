// Package container runs programs as a container runtime does, as far as tests depend on it:
// with a separate root, mounts, user and capabilities.
package container

import (
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// argument precedes the name of a file with a Container on the command line of a test's executable.
const argument = "container"

// Container is a container as a runtime creates it: the test's executable starts itself
// ([Command]), sets up root, mounts, user and capabilities ([Main]), and becomes the program.
type Container struct {
	// PID is a process whose root is entered, as by `kubectl exec`; the fields down to Programs are
	// then unused.
	PID int
	// Root is an empty directory.
	Root    string
	Volumes []Volume
	// Programs are copied into the root with their file capabilities. /bin is a link to the host's
	// programs; if a program is in /bin, /bin contains only the program and sh.
	Programs []Program
	// Links are symbolic links in the root, by path.
	Links map[string]string
	// Dir is the working directory; "/" if empty.
	Dir string

	UID, GID, FSGroup int
	// Capabilities is the bounding set.
	Capabilities []string
	NoNewPrivs   bool

	Environment, Arguments []string
}

// Volume is a directory of the host in a container.
type Volume struct {
	Source, Path string
	ReadOnly     bool
}

// Program is an executable in a container.
type Program struct {
	Source, Path string
	Capabilities []string
	Raised       bool // the program raises its capabilities: `+p` instead of `+ep`
}

var capabilityNumbers = map[string]int{
	"NET_BIND_SERVICE": unix.CAP_NET_BIND_SERVICE,
	"NET_ADMIN":        unix.CAP_NET_ADMIN,
	"NET_RAW":          unix.CAP_NET_RAW,
	"DAC_OVERRIDE":     unix.CAP_DAC_OVERRIDE,
	"SYS_PTRACE":       unix.CAP_SYS_PTRACE,
}

// Mask returns the set of capabilities as /proc/PID/status shows it.
func Mask(names []string) uint64 {
	var mask uint64
	for _, name := range names {
		mask |= 1 << capabilityNumbers[name]
	}
	return mask
}

// Main becomes the program of a container if the process was started by [Container.Command]. A
// TestMain calls it first.
func Main() {
	if len(os.Args) == 3 && os.Args[1] == argument {
		fmt.Fprintln(os.Stderr, run(os.Args[2]))
		os.Exit(1)
	}
}

// Command writes the container to a file, and returns the command line of its program.
func (c *Container) Command(file string) ([]string, error) {
	executable, err := os.Executable()
	if err != nil {
		return nil, err
	}
	data, err := json.Marshal(c)
	if err != nil {
		return nil, err
	}
	return []string{executable, argument, file}, os.WriteFile(file, data, 0o600)
}

// run becomes the program of a container. It returns only an error.
func run(file string) error {
	// Root, mounts and capabilities are per thread until execve(2).
	runtime.LockOSThread()
	data, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var c Container
	if err := json.Unmarshal(data, &c); err != nil {
		return err
	}
	root := c.Root
	if c.PID != 0 {
		root = fmt.Sprintf("/proc/%d/root", c.PID)
	}
	if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("mount namespace: %w", err)
	}
	if c.PID == 0 {
		if err := c.makeRoot(); err != nil {
			return fmt.Errorf("root of the container: %w", err)
		}
	}
	if err := errors.Join(unix.Chroot(root), unix.Chdir(cmp.Or(c.Dir, "/"))); err != nil {
		return fmt.Errorf("enter the root: %w", err)
	}
	for n := range unix.CAP_LAST_CAP + 1 {
		if Mask(c.Capabilities)&(1<<n) == 0 {
			if err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(n), 0, 0, 0); err != nil {
				return fmt.Errorf("drop capability %d: %w", n, err)
			}
		}
	}
	if c.NoNewPrivs {
		if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
			return fmt.Errorf("no_new_privs: %w", err)
		}
	}
	if err := errors.Join(syscall.Setgroups([]int{c.FSGroup}), syscall.Setgid(c.GID), syscall.Setuid(c.UID)); err != nil {
		return fmt.Errorf("user of the container: %w", err)
	}
	return fmt.Errorf("execute %s: %w", c.Arguments[0], unix.Exec(c.Arguments[0], c.Arguments, c.Environment))
}

// makeRoot creates a read-only root with the host's programs and libraries.
func (c *Container) makeRoot() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("private mounts: %w", err)
	}
	// Not nosuid, which would disable file capabilities.
	if err := unix.Mount("tmpfs", c.Root, "tmpfs", 0, "mode=0755"); err != nil {
		return fmt.Errorf("tmpfs: %w", err)
	}
	in := func(path string) string { return filepath.Join(c.Root, path) }
	for _, dir := range []string{"etc", "run", "var", "usr", "dev", "proc", ".programs"} {
		if err := os.Mkdir(in(dir), 0o755); err != nil {
			return err
		}
	}
	if err := os.Symlink("../run", in("var/run")); err != nil {
		return err
	}
	for _, dir := range []string{"bin", "sbin", "lib", "lib64"} {
		if dir == "bin" && c.inBin() {
			if err := errors.Join(os.Mkdir(in(dir), 0o755), os.Symlink("/usr/bin/sh", in("bin/sh"))); err != nil {
				return err
			}
			continue
		}
		if target, err := os.Readlink("/" + dir); err == nil {
			if err := os.Symlink(target, in(dir)); err != nil {
				return err
			}
		}
	}
	if err := errors.Join(bind("/usr", in("usr"), true), bind("/dev", in("dev"), false),
		bind("/proc", in("proc"), false)); err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", in("usr/local/bin"), "tmpfs", 0, "mode=0755"); err != nil {
		return fmt.Errorf("tmpfs: %w", err)
	}
	for _, p := range c.Programs {
		if err := p.install(c.Root); err != nil {
			return fmt.Errorf("program %s: %w", p.Path, err)
		}
	}
	for path, target := range c.Links {
		if err := errors.Join(os.MkdirAll(filepath.Dir(in(path)), 0o755), os.Symlink(target, in(path))); err != nil {
			return err
		}
	}
	for _, v := range c.Volumes {
		if err := os.MkdirAll(in(v.Path), 0o755); err != nil {
			return err
		}
		if err := bind(v.Source, in(v.Path), v.ReadOnly); err != nil {
			return err
		}
	}
	return errors.Join(readOnly(in("usr/local/bin")), readOnly(c.Root))
}

// inBin reports whether a program is in /bin.
func (c *Container) inBin() bool {
	return slices.ContainsFunc(c.Programs, func(p Program) bool { return filepath.Dir(p.Path) == "/bin" })
}

// install copies the program, with file capabilities if it has any, and mounts it over an
// existing file.
func (p Program) install(root string) error {
	data, err := os.ReadFile(p.Source)
	if err != nil {
		return err
	}
	path := filepath.Join(root, p.Path)
	_, err = os.Stat(path)
	over := err == nil
	file := path
	if over {
		file = filepath.Join(root, ".programs", filepath.Base(p.Path))
	}
	if err := os.WriteFile(file, data, 0o755); err != nil {
		return err
	}
	if len(p.Capabilities) > 0 {
		if err := unix.Setxattr(file, "security.capability", p.fileCapabilities(), 0); err != nil {
			return fmt.Errorf("file capabilities: %w", err)
		}
	}
	if over {
		return bind(file, path, true)
	}
	return nil
}

// fileCapabilities returns a vfs_cap_data of revision 2 (linux/capability.h).
func (p Program) fileCapabilities() []byte {
	mask, header := Mask(p.Capabilities), uint32(0x02000000|1) // revision 2, effective
	if p.Raised {
		header &^= 1
	}
	b := binary.LittleEndian.AppendUint32(nil, header)
	b = binary.LittleEndian.AppendUint32(b, uint32(mask))
	b = binary.LittleEndian.AppendUint32(b, 0)
	b = binary.LittleEndian.AppendUint32(b, uint32(mask>>32))
	return binary.LittleEndian.AppendUint32(b, 0)
}

func bind(source, target string, ro bool) error {
	if err := unix.Mount(source, target, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("bind %s: %w", source, err)
	}
	if ro {
		return readOnly(target)
	}
	return nil
}

func readOnly(target string) error {
	if err := unix.Mount("", target, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		return fmt.Errorf("read-only %s: %w", target, err)
	}
	return nil
}

// Status holds fields of /proc/PID/status.
type Status struct {
	UID, GID   string
	Effective  string
	Bounding   string
	NoNewPrivs string
}

// ReadStatus reads the status of a process.
func ReadStatus(pid int) (Status, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return Status{}, err
	}
	fields := map[string]string{}
	for line := range strings.Lines(string(b)) {
		name, value, _ := strings.Cut(line, ":")
		if words := strings.Fields(value); len(words) > 0 {
			fields[name] = words[0]
		}
	}
	return Status{fields["Uid"], fields["Gid"], fields["CapEff"], fields["CapBnd"], fields["NoNewPrivs"]}, nil
}

// Assignments returns variables as execve takes them.
func Assignments(variables map[string]string) []string {
	var list []string
	for name, value := range variables {
		list = append(list, name+"="+value)
	}
	slices.Sort(list)
	return list
}
