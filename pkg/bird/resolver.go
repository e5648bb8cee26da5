package bird

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/bird/path"
	"github.com/vipgate/vipgate/pkg/files"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/rtnetlink"
	"github.com/vipgate/vipgate/pkg/task"
	"github.com/vipgate/vipgate/pkg/tick"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/turns"
)

const (
	// resolveInterval is how often addresses and password files are read: a poll is fast enough,
	// since a new session waits for its connect delay of one second.
	resolveInterval = time.Second
	// checkInterval replaces resolveInterval if no password file is configured and the kernel sends
	// address notifications.
	checkInterval = 5 * time.Second
	// notifyPause delays the read after a notification, because addresses often change in groups.
	notifyPause = 20 * time.Millisecond
)

// resolution is the desired configuration of BIRD with the addresses and passwords of its sessions.
type resolution struct {
	generation uint64          // generation of desired; 0 before the first Configure
	sequence   uint64          // counts the contents
	desired    []turns.Session // with the addresses and passwords of now
	gateways   []trench.Gateway
	changes    map[string]turns.Change // by gateway
	problems   map[string]string       // why a gateway has no session, by gateway
	input      renderInput
	content    []byte
	protocols  []string // names of the protocols in content
	err        error    // rendering error; content is then nil
}

// resolver publishes resolutions, in a separate goroutine: the kernel and file systems can block.
type resolver struct {
	options Options
	desired *latest.Value[desired]
	result  *latest.Value[resolution]
	state   *latest.Value[State] // of BIRD
	kernel  path.Kernel
	// listen subscribes to changes of addresses; wake must not block.
	listen func(wake func()) (*rtnetlink.Listener, error)

	pulse task.Pulse

	// Owned by run.
	plan      turns.Plan
	wake      time.Time               // next step of the plan; zero without one
	calls     map[string]*files.Calls // by password file: each may be on another mount that hangs
	external  string                  // interface of lastKnown
	lastKnown []rtnetlink.Address     // result of the last successful read
	warned    bool                    // the current failure was logged
}

func newResolver(options Options, w *latest.Value[desired]) *resolver {
	return &resolver{
		options: options, desired: w, result: latest.New(resolution{}), kernel: path.System(),
		listen: listenAddresses, calls: map[string]*files.Calls{}, state: latest.New(State{}),
		plan: turns.Plan{Options: turns.Options{
			Drain: options.DrainTime, Confirm: leaveMargin, Limit: sessionLimit, SlotTime: options.SlotTime,
			Slot: turns.Slot(options.RouterID.String()),
		}},
	}
}

func (resolver *resolver) run(ctx context.Context) {
	notified := make(chan struct{}, 1)
	listener, err := resolver.listen(func() { latest.Wake(notified) })
	if err != nil {
		resolver.options.Log.Warn("address notifications are not available, polling only", "error", err)
	}
	defer func() { _ = listener.Close() }() // the error is irrelevant: run returns
	failed := listener.Failed()
	timer := time.NewTimer(0)
	defer timer.Stop()
	defer resolver.pulse.End()
	for read := true; ; read = true {
		resolver.pulse.Next(0)
		w, changed := resolver.desired.Get()
		state, observed := resolver.state.Get() // before the state is used
		if w.generation > 0 {
			before := resolver.result.Load()
			sessions := before
			if read || w.generation != before.generation {
				sessions.desired, sessions.problems = resolver.resolveSessions(ctx, w.attractor, before.desired)
			}
			now, changed := resolver.proceed(w, state, sessions, before)
			if changed && ctx.Err() == nil {
				resolver.result.Set(now)
			}
		}
		// Only a change in progress depends on the state of BIRD.
		if !resolver.plan.Active() && !state.hung() {
			observed = nil
		}
		interval := resolveInterval
		// Password files, routers and routes have no notifications here, so they are polled like
		// addresses without a listener.
		polled := func(g trench.Gateway) bool { return g.PasswordFile != "" || g.Interface != "" || g.Multihop > 0 }
		if err == nil && !slices.ContainsFunc(w.attractor.Gateways, polled) {
			interval = checkInterval
		}
		next := tick.Until(time.Now(), interval)
		if !resolver.wake.IsZero() {
			next = max(0, min(next, time.Until(resolver.wake)))
		}
		timer.Reset(next)
		resolver.pulse.Next(next)
		select {
		case <-changed:
		case <-observed:
			read = false
			continue
		case <-timer.C:
		case <-failed:
			// A closed channel is always ready, so stop the select on it.
			failed, err = nil, listener.Err()
			resolver.options.Log.Warn("address notifications failed, polling only", "error", err)
		case <-notified:
			timer.Reset(notifyPause)
			select {
			case <-changed:
			case <-timer.C:
			case <-ctx.Done():
				return
			}
		case <-ctx.Done():
			return
		}
	}
}

// listenAddresses subscribes to changes of links and addresses.
func listenAddresses(wake func()) (*rtnetlink.Listener, error) {
	l := rtnetlink.NewListener()
	return l, l.Listen("addresses", rtnetlink.Subscription{
		Protocol: unix.NETLINK_ROUTE,
		Groups:   []uint32{unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR},
		Handle:   func(netlink.Message) { wake() }, Overrun: wake,
	})
}

// resolve reads addresses and passwords, and returns a resolution as proceed does.
func (resolver *resolver) resolve(ctx context.Context, w desired, state State, before resolution) (now resolution,
	changed bool,
) {
	read := resolution{}
	read.desired, read.problems = resolver.resolveSessions(ctx, w.attractor, before.desired)
	return resolver.proceed(w, state, read, before)
}

// proceed returns a resolution with the sessions that the plan allows now, and reports whether it
// differs from the previous one. It renders the configuration only after a change, because
// rendering many VIPs is expensive.
func (resolver *resolver) proceed(w desired, state State, read, before resolution) (now resolution, changed bool) {
	a := w.attractor
	now = resolution{generation: w.generation, desired: read.desired, problems: read.problems}
	now.input = renderInput{
		Options: resolver.options, Interface: a.Interface, VIPs: a.VIPs,
		Advertise: slices.ContainsFunc(a.Gateways, func(g trench.Gateway) bool { return g.Interface != "" }),
	}
	resolver.takeTurns(w, state, &now, before.sequence)
	if before.generation == w.generation && slices.Equal(before.input.Sessions, now.input.Sessions) {
		now.sequence = before.sequence
		now.content, now.protocols, now.err = before.content, before.protocols, before.err
		return now, !maps.Equal(before.problems, now.problems) ||
			!maps.EqualFunc(before.changes, now.changes, turns.Change.Equal)
	}
	now.sequence = before.sequence + 1
	now.content, now.err = render(now.input)
	now.protocols = now.input.protocols()
	return now, true
}

// resolveSessions returns the sessions, and the problem of each gateway without a session.
func (resolver *resolver) resolveSessions(
	ctx context.Context, a trench.Attractor, before []turns.Session,
) (sessions []turns.Session, problems map[string]string) {
	addrs, err := resolver.localAddresses(a.Interface)
	problems = map[string]string{}
	// One deadline for all files: consecutive hangs would delay address changes by minutes.
	reading, cancel := context.WithTimeoutCause(ctx, files.Timeout, files.ErrHung)
	defer cancel()
	for _, gateway := range a.Gateways {
		if err != nil {
			problems[gateway.Name] = err.Error()
			continue
		}
		var current turns.Session
		same := func(b turns.Session) bool { return b.Name == gateway.Name }
		if i := slices.IndexFunc(before, same); i >= 0 {
			current = before[i]
		}
		session, problem := resolver.kernel.Find(a.Interface, turns.Session{Gateway: gateway}, current, addrs)
		if problem != "" {
			problems[gateway.Name] = fmt.Sprintf("interface %s: %s", a.Interface, problem)
			continue
		}
		var err error
		session.Password, err = resolver.password(reading, gateway.PasswordFile)
		sameFile := func(b turns.Session) bool { return b.PasswordFile == gateway.PasswordFile }
		if i := slices.IndexFunc(before, sameFile); i >= 0 && errors.Is(err, files.ErrHung) {
			session.Password, err = before[i].Password, nil // a file system that hangs must not end the session
		}
		if err != nil {
			// Never an empty password: the session would come up unsigned.
			problems[gateway.Name] = err.Error()
			continue
		}
		sessions = append(sessions, session)
	}
	return sessions, problems
}

// localAddresses returns the external interface's addresses, the last known ones if the read fails.
func (resolver *resolver) localAddresses(external string) ([]rtnetlink.Address, error) {
	if external != resolver.external {
		resolver.external, resolver.lastKnown = external, nil
	}
	addrs, err := resolver.kernel.Addresses(external)
	switch {
	case err == nil:
		resolver.lastKnown, resolver.warned = addrs, false
	case errors.Is(err, path.ErrNoInterface) || resolver.lastKnown == nil:
		resolver.lastKnown = nil
		return nil, err
	case !resolver.warned:
		resolver.warned = true
		resolver.options.Log.Warn("failed to read local addresses; using the last known ones",
			"interface", external, "error", err)
	}
	return resolver.lastKnown, nil
}

// maxPasswordFile bounds a password file.
const maxPasswordFile = 64 << 10

// password returns the password in a file, or an empty one without a path.
func (resolver *resolver) password(ctx context.Context, path string) (string, error) {
	if path == "" {
		return "", nil
	}
	calls := resolver.calls[path]
	if calls == nil {
		calls = &files.Calls{Path: path}
		resolver.calls[path] = calls
	}
	// A read from a network file system may hang.
	b, err := files.Do(ctx, calls, "password file "+path,
		func() ([]byte, error) { return files.Read(path, maxPasswordFile) })
	if errors.Is(err, fs.ErrNotExist) {
		if explain := resolver.options.ExplainPassword; explain != nil && explain(path) != "" {
			return "", fmt.Errorf("password file %s does not exist: %s", path, explain(path))
		}
		return "", fmt.Errorf("password file %s does not exist", path)
	}
	if err != nil {
		return "", fmt.Errorf("failed to read password file: %w", err)
	}
	password, err := parsePassword(b)
	if err != nil {
		return "", fmt.Errorf("password file %s: %w", path, err)
	}
	return password, nil
}

// parsePassword returns the password in the content of a password file, without one trailing
// newline. BIRD 2.0.12 has no escapes in strings, so quotes and control characters are refused.
func parsePassword(content []byte) (string, error) {
	s := strings.TrimSuffix(strings.TrimSuffix(string(content), "\n"), "\r")
	switch {
	case s == "":
		return "", errors.New("password is empty")
	case len(s) > unix.TCP_MD5SIG_MAXKEYLEN:
		return "", fmt.Errorf("password has %d bytes; TCP-MD5 takes at most %d", len(s), unix.TCP_MD5SIG_MAXKEYLEN)
	}
	if strings.ContainsFunc(s, func(c rune) bool { return c < 0x20 || c == 0x7f || c == '"' }) {
		return "", errors.New("password contains a quote or a control character, which BIRD cannot escape")
	}
	return s, nil
}
