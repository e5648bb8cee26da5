package identity

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"syscall"
	"time"

	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/files"
)

const (
	// lockRetry is the poll interval of a lock that another process holds.
	lockRetry = 10 * time.Millisecond
	// lockWait bounds that wait; the other process writes a few files, which takes milliseconds.
	lockWait = 10 * time.Second
)

// waitLock takes the lock on path once it is free, within lockWait, or until ctx ends.
func waitLock(ctx context.Context, path string) (*files.Lock, error) {
	ctx, cancel := context.WithTimeout(ctx, lockWait)
	defer cancel()
	for {
		lock, err := files.TryLock(path)
		if !errors.Is(err, files.ErrLocked) || backoff.Sleep(ctx, lockRetry) != nil {
			return lock, err
		}
	}
}

const (
	// ownerTimeout bounds the request to the owner of a network namespace.
	ownerTimeout = time.Second
	// maxOwnerText bounds the owner's response: a socket path and a few words.
	maxOwnerText = 256
)

// OwnNetNS makes this process the only one of its role ("lb", "frontend") in its network namespace
// until release is called or the process ends. The lock is an abstract unix socket: the kernel
// keeps it per network namespace, and no mount namespace or leftover file can hide or fake it.
// about is the text that other processes receive. While another process owns the namespace, the
// error names it.
func OwnNetNS(ctx context.Context, role, about string) (release func(), err error) {
	name := "@vipgate/" + role
	listener, err := (&net.ListenConfig{}).Listen(ctx, "unix", name)
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, fmt.Errorf("another %s (%s) owns this network namespace; stop it first", role, describeOwner(ctx, name))
	}
	if err != nil {
		return nil, fmt.Errorf("socket %s, which locks the network namespace: %w", name, err)
	}
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			conn, err := listener.Accept()
			if err != nil {
				// Out of file descriptors, or closed. The lock does not depend on the response.
				_ = backoff.Sleep(ctx, ownerTimeout)
				continue
			}
			// The response fits the socket buffer: no peer can block this.
			_, _ = io.WriteString(conn, about)
			_ = conn.Close()
		}
	}()
	return func() { cancel(); _ = listener.Close(); <-done }, nil
}

// NetNSOwner describes the process that owns the network namespace in a role, as [OwnNetNS] does in
// its error; "" if no process does.
func NetNSOwner(ctx context.Context, role string) string {
	name := "@vipgate/" + role
	ctx, cancel := context.WithTimeout(ctx, ownerTimeout)
	defer cancel()
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", name)
	if errors.Is(err, syscall.ECONNREFUSED) {
		return ""
	}
	if err == nil {
		_ = conn.Close()
	}
	return fmt.Sprintf("%s (%s)", role, describeOwner(ctx, name))
}

// describeOwner describes the owner of a network namespace: its process and user as reported by the
// kernel, since any process of the namespace can bind the socket, and its about text.
func describeOwner(ctx context.Context, name string) string {
	ctx, cancel := context.WithTimeout(ctx, ownerTimeout)
	defer cancel()
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", name)
	if err != nil {
		return "which does not answer: " + err.Error()
	}
	defer conn.Close()
	cred, err := PeerProcess(conn)
	if err != nil {
		return err.Error()
	}
	who := fmt.Sprintf("pid %d, user %d", cred.Pid, cred.Uid)
	// SO_PEERCRED reports PID 0 for a process that this PID namespace does not contain.
	if cred.Pid == 0 {
		who = fmt.Sprintf("in another PID namespace, user %d", cred.Uid)
	}
	deadline, _ := ctx.Deadline()
	_ = conn.SetReadDeadline(deadline)
	about, err := io.ReadAll(io.LimitReader(conn, maxOwnerText))
	if err != nil {
		return who + ", which does not answer"
	}
	// Any process can bind the socket: escape control characters before they reach a terminal.
	if bytes.ContainsFunc(about, func(r rune) bool { return r < ' ' || r > '~' }) {
		return fmt.Sprintf("%s, %q", who, about)
	}
	return fmt.Sprintf("%s, %s", who, about)
}
