package bird

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/durable"
)

// applyState is the progress of loading resolutions into BIRD. Only the file write is
// asynchronous, because a disk may be slow.
type applyState struct {
	current resolution // loaded by BIRD and in the file
	pending resolution // being written
	written chan error // receives the result of writing pending; nil if no write is in progress
	refused []byte     // content that BIRD refused last; not retried
	retries retries
	again   bool // load current again: BIRD lacks some of its protocols
}

// awaitWrite waits for the end of a write, and discards its result.
func (state *applyState) awaitWrite() {
	if state.written != nil {
		<-state.written
		state.written = nil
	}
}

// retries is the back-off after failures that are not refusals by BIRD, such as a full disk.
type retries struct {
	delay     backoff.Backoff
	failures  int
	notBefore time.Time
}

func (r *retries) failed(now time.Time) {
	r.failures++
	r.delay.Min, r.delay.Max = time.Second, 30*time.Second
	r.notBefore = now.Add(r.delay.Next())
}

// stage starts writing the configuration of the newest resolution unless BIRD has loaded it.
func (supervisor *Supervisor) stage() {
	state, resolution := &supervisor.apply, supervisor.resolver.result.Load()
	if state.again && (resolution.err != nil || bytes.Equal(resolution.content, state.refused)) {
		resolution = state.current
	}
	switch {
	case state.written != nil:
		return // one write at a time: serve calls stage again after it
	case !state.again && resolution.err == nil && bytes.Equal(resolution.content, state.current.content):
		state.current = resolution
		supervisor.configured()
		return
	case time.Now().Before(state.retries.notBefore), resolution.err == nil &&
		bytes.Equal(resolution.content, state.refused):
		return
	case resolution.err != nil:
		supervisor.configFailed(resolution.err)
		return
	}
	written, path := make(chan error, 1), supervisor.file.staged()
	state.pending, state.written, state.again = resolution, written, false
	// Write in a goroutine: a slow disk must not stop the polls of BIRD.
	go func() { written <- durable.Replace(path, resolution.content, 0o600) }()
}

// applyStaged loads the written configuration into BIRD. If BIRD refuses it, the old one stays.
func (supervisor *Supervisor) applyStaged(ctx context.Context, err error) {
	state := &supervisor.apply
	state.written = nil
	if err == nil {
		err = supervisor.reconfigure(ctx)
	}
	switch {
	case ctx.Err() != nil:
		return
	case err != nil:
		supervisor.configFailed(err)
		return
	}
	state.current = state.pending
	supervisor.configured()
	supervisor.options.Log.Info("BIRD configuration loaded",
		"gateways", len(state.current.input.Sessions), "without_session", len(state.current.problems))
	supervisor.fast.start(time.Now())
	supervisor.state.Update(func(st State) State { st.Configures++; return st })
}

func (supervisor *Supervisor) reconfigure(ctx context.Context) error {
	_, err := supervisor.command(ctx, `configure check "`+supervisor.file.staged()+`"`)
	if err := supervisor.file.replace(err); err != nil {
		return err
	}
	// The lease must cover old and new static gateways during the reload: no BFD session may come
	// up, or stay up, without it.
	after := supervisor.apply.pending.input.heldDown()
	both := slices.Concat(supervisor.apply.current.input.heldDown(), after)
	slices.SortFunc(both, netip.Addr.Compare)
	if err := supervisor.holdable(ctx, slices.Compact(both)); err != nil {
		return err
	}
	if _, err := supervisor.command(ctx, `configure "`+supervisor.file.path+`"`); err != nil {
		return fmt.Errorf("failed to load BIRD's new configuration: %w", err)
	}
	if err := supervisor.lease.Gateways(ctx, after); err != nil {
		supervisor.options.Log.Warn("removed static gateways keep their entry in the lease of BFD sessions", "error", err)
	}
	return nil
}

// holdable puts static gateways under the lease. Without static gateways it ignores a failure to
// remove the table of an earlier configuration.
func (supervisor *Supervisor) holdable(ctx context.Context, gateways []netip.Addr) error {
	err := supervisor.lease.Gateways(ctx, gateways)
	if err != nil && len(gateways) == 0 && ctx.Err() == nil {
		supervisor.options.Log.Warn("failed to remove the lease of BFD sessions", "error", err)
		return nil
	}
	return err
}

func (supervisor *Supervisor) configured() {
	supervisor.apply.refused, supervisor.apply.retries = nil, retries{}
	if supervisor.state.Load().ConfigErr != nil {
		supervisor.state.Update(func(st State) State { st.ConfigErr = nil; return st })
	}
}

// configFailed records a failure to configure BIRD. A refused configuration is not retried.
func (supervisor *Supervisor) configFailed(err error) {
	if _, refused := errors.AsType[*refusedError](err); refused {
		supervisor.apply.refused = supervisor.apply.pending.content
	} else {
		supervisor.apply.retries.failed(time.Now())
	}
	supervisor.options.Log.Error("failed to configure BIRD; it keeps its previous configuration", "error", err)
	supervisor.state.Update(func(st State) State { st.ConfigErr = err; st.ConfigFailures++; return st })
}

// prepare writes the configuration for a new BIRD process: the desired one or, if that fails, the
// last one that BIRD loaded.
func (supervisor *Supervisor) prepare(ctx context.Context) error {
	state := &supervisor.apply
	state.pending = supervisor.resolver.result.Load()
	err := state.pending.err
	if err == nil && !bytes.Equal(state.pending.content, state.current.content) &&
		!bytes.Equal(state.pending.content, state.refused) {
		if err = supervisor.file.install(ctx, state.pending.content); err == nil {
			state.current = state.pending
			supervisor.configured()
			return nil
		}
	}
	switch {
	case ctx.Err() != nil, state.current.content == nil:
		return err
	case err != nil:
		supervisor.configFailed(err)
	}
	// Do not write an unchanged file: BIRD must be able to restart on a full or read-only disk.
	if b, err := os.ReadFile(supervisor.file.path); err == nil && bytes.Equal(b, state.current.content) {
		return nil
	}
	return durable.Replace(supervisor.file.path, state.current.content, 0o600)
}

// checkTimeout bounds `bird -p`, which takes 10 ms.
const checkTimeout = 10 * time.Second

type configFile struct{ path, executable string }

// staged returns the path of a configuration that is not checked yet.
func (file configFile) staged() string { return file.path + ".new" }

// install checks a configuration with `bird -p` and replaces the file.
func (file configFile) install(ctx context.Context, content []byte) error {
	if err := durable.Replace(file.staged(), content, 0o600); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	check := exec.CommandContext(ctx, file.executable, "-p", "-c", file.staged())
	check.WaitDelay = time.Second // a child process of BIRD may keep the output open
	output, err := check.CombinedOutput()
	if exit, failed := errors.AsType[*exec.ExitError](err); failed && exit.Exited() {
		err = &refusedError{codeConfigFailed, string(bytes.TrimSpace(output))}
	}
	return file.replace(err)
}

// replace installs the staged file, which a restarted BIRD reads, if its check passed.
func (file configFile) replace(checkErr error) error {
	if checkErr != nil {
		checkErr = fmt.Errorf("failed to check BIRD's new configuration: %w", checkErr)
		return errors.Join(checkErr, os.Remove(file.staged()))
	}
	if err := os.Rename(file.staged(), file.path); err != nil {
		return fmt.Errorf("failed to replace BIRD's configuration: %w", err)
	}
	return nil
}
