package fastpath

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
)

// Interface is a network interface whose received packets the program may forward.
type Interface struct {
	Name string
	// Reason is why the program is not attached; "" if it is.
	Reason string
}

// Program is the tcx program, its maps and its links, in the network namespace of the thread that
// calls Apply. It is not safe for concurrent use.
type Program struct {
	current *instance // nil while detached
	links   map[int]link.Link
	// earlier holds the counters of earlier instances.
	earlier map[uint32]Counter
}

// New returns a detached program.
func New() *Program { return &Program{links: map[int]link.Link{}, earlier: map[uint32]Counter{}} }

// Probe returns why the fast path cannot work in the network namespace of the calling thread.
func Probe() error {
	loaded, err := load(capacityFor(Content{}))
	if err != nil {
		return explain(err)
	}
	// Without VIPs the program forwards nothing. The loopback interface exists in every namespace.
	attached, err := attach(1, loaded)
	if err == nil {
		err = attached.Close()
	}
	return explain(errors.Join(err, loaded.Close()))
}

// explain adds the condition that an error of the kernel shows.
func explain(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, ebpf.ErrNotSupported):
		return fmt.Errorf("the kernel lacks tcx of Linux 6.6: %w", err)
	case errors.Is(err, unix.EPERM):
		// The library's text suggests a memory limit that Linux 5.11 removed.
		return fmt.Errorf("the process lacks CAP_BPF or CAP_NET_ADMIN: %w", unix.EPERM)
	}
	return err
}

// Attached reports whether the program is in front of nftables.
func (program *Program) Attached() bool { return len(program.links) > 0 }

// Suspend makes the packets of a stream continue to nftables until the next Apply, before a change
// of the stream in nftables.
func (program *Program) Suspend(stream string) error {
	if program.current == nil {
		return nil
	}
	if err := program.current.suspend(stream); err != nil {
		return errors.Join(fmt.Errorf("suspend stream %s in the fast path: %w", stream, err), program.Detach())
	}
	return nil
}

// Apply forwards by a content that nftables is confirmed to have, and attaches the program to
// interfaces. After an error nothing is attached.
func (program *Program) Apply(content Content, links []plan.Link) ([]Interface, error) {
	err := program.update(content)
	var list []Interface
	if err == nil {
		list, err = program.attachAll(links)
	}
	if err != nil {
		return nil, errors.Join(explain(err), program.Detach())
	}
	return list, nil
}

// update writes a content into the current instance, or into a larger one that replaces it.
func (program *Program) update(content Content) error {
	if program.current != nil {
		err := program.current.apply(content)
		if !errors.Is(err, errFull) {
			return err
		}
	}
	next, err := load(capacityFor(content))
	if err != nil {
		return fmt.Errorf("load the fast path: %w", err)
	}
	if err := next.apply(content); err != nil {
		return errors.Join(fmt.Errorf("fill the fast path: %w", err), next.Close())
	}
	for _, attached := range program.links {
		// The kernel replaces the program of a link atomically.
		if err := attached.Update(next.Fastpath); err != nil {
			return errors.Join(fmt.Errorf("replace the fast path: %w", err), next.Close())
		}
	}
	old := program.current
	program.current = next
	return program.discard(old)
}

// discard closes an instance whose program is no longer attached, and keeps its counters.
func (program *Program) discard(old *instance) error {
	if old == nil {
		return nil
	}
	return errors.Join(old.counters(program.earlier), old.Close())
}

// attachAll attaches the program to new interfaces and detaches it from others.
func (program *Program) attachAll(links []plan.Link) (list []Interface, err error) {
	stays := map[int]bool{}
	for _, at := range links {
		if at.Loopback {
			continue
		}
		reason := ""
		switch {
		case !at.Ethernet:
			reason = "it is not an Ethernet interface"
		case at.Port:
			reason = "it is a port of a bridge or bond, which receives the packets"
		case program.links[at.Index] == nil:
			attached, err := attach(at.Index, program.current)
			if err != nil {
				reason = explain(err).Error()
				break
			}
			program.links[at.Index] = attached
		}
		stays[at.Index] = reason == ""
		list = append(list, Interface{Name: at.Name, Reason: reason})
	}
	for index, attached := range program.links {
		if !stays[index] {
			delete(program.links, index)
			err = errors.Join(err, attached.Close())
		}
	}
	slices.SortFunc(list, func(a, b Interface) int { return cmp.Compare(a.Name, b.Name) })
	return list, err
}

// attach attaches the program before all others: a program that returns TCX_PASS ends the chain.
func attach(index int, loaded *instance) (link.Link, error) {
	return link.AttachTCX(link.TCXOptions{
		Interface: index, Program: loaded.Fastpath, Attach: ebpf.AttachTCXIngress, Anchor: link.Head(),
	})
}

// Verify returns an error, and detaches the program, if a process changed a map or detached a link.
func (program *Program) Verify() error {
	if program.current == nil {
		return nil
	}
	err := program.current.verify()
	for index, attached := range program.links {
		info, infoErr := attached.Info()
		if infoErr == nil && int(info.TCX().Ifindex) != index {
			infoErr = fmt.Errorf("another process detached the fast path from interface %d", index)
		}
		err = errors.Join(err, infoErr)
	}
	if err != nil {
		return errors.Join(err, program.Detach())
	}
	return nil
}

// Counters returns the packets that the program forwarded to each target, by fwmark.
func (program *Program) Counters() (map[uint32]Counter, error) {
	total := maps.Clone(program.earlier)
	if program.current == nil {
		return total, nil
	}
	if err := program.current.counters(total); err != nil {
		return nil, fmt.Errorf("read the counters of the fast path: %w", err)
	}
	return total, nil
}

// Forget lets the counters of fwmarks start at 0, for the targets that get them next.
func (program *Program) Forget(fwmarks []uint32) error {
	counted := map[uint32]Counter{}
	if program.current != nil {
		if err := program.current.counters(counted); err != nil {
			return fmt.Errorf("read the counters of the fast path: %w", err)
		}
	}
	for _, fwmark := range fwmarks {
		// Added to the counters in the map, this wraps around to 0.
		program.earlier[fwmark] = Counter{-counted[fwmark].Packets, -counted[fwmark].Bytes}
	}
	return nil
}

// Detach closes the links first, then the maps. nftables forwards all packets.
func (program *Program) Detach() (err error) {
	for index, attached := range program.links {
		delete(program.links, index)
		err = errors.Join(err, attached.Close())
	}
	old := program.current
	program.current = nil
	return errors.Join(err, program.discard(old))
}
