package bird

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/durable"
)

// configPath returns the path of the configuration. It is not bird.conf, which may belong to
// another BIRD on the same host.
func (s *Supervisor) configPath() string { return filepath.Join(s.options.Dir, "vipgate.conf") }

func (s *Supervisor) stagedPath() string { return s.configPath() + ".new" }

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
func (s *Supervisor) stage() {
	a, v := &s.apply, s.resolver.result.Load()
	if a.again && (v.err != nil || bytes.Equal(v.content, a.refused)) {
		v = a.current
	}
	switch {
	case a.written != nil:
		return // one write at a time: serve calls stage again after it
	case !a.again && v.err == nil && bytes.Equal(v.content, a.current.content):
		a.current = v
		s.configured()
		return
	case time.Now().Before(a.retries.notBefore), v.err == nil && bytes.Equal(v.content, a.refused):
		return
	case v.err != nil:
		s.configFailed(v.err)
		return
	}
	written, path := make(chan error, 1), s.stagedPath()
	a.pending, a.written, a.again = v, written, false
	go func() { written <- durable.Replace(path, v.content, 0o600) }()
}

// applyStaged loads the written configuration into BIRD. If BIRD refuses it, the old one stays.
func (s *Supervisor) applyStaged(ctx context.Context, err error) {
	a := &s.apply
	a.written = nil
	if err == nil {
		err = s.reconfigure(ctx)
	}
	switch {
	case ctx.Err() != nil:
		return
	case err != nil:
		s.configFailed(err)
		return
	}
	a.current = a.pending
	s.configured()
	s.options.Log.Info("BIRD configuration loaded",
		"gateways", len(a.current.input.Sessions), "without_session", len(a.current.problems))
	s.fast.start(time.Now())
	s.state.Update(func(st State) State { st.Configures++; return st })
}

func (s *Supervisor) reconfigure(ctx context.Context) error {
	_, err := s.command(ctx, `configure check "`+s.stagedPath()+`"`)
	if err := s.replaceFile(err); err != nil {
		return err
	}
	// The lease must cover old and new static gateways during the reload: no BFD session may come
	// up, or stay up, without it.
	before, after := s.apply.current.input.heldDown(), s.apply.pending.input.heldDown()
	if err := s.holdable(ctx, union(before, after)); err != nil {
		return err
	}
	if _, err := s.command(ctx, `configure "`+s.configPath()+`"`); err != nil {
		return fmt.Errorf("failed to load BIRD's new configuration: %w", err)
	}
	if err := s.lease.Gateways(ctx, after); err != nil {
		s.options.Log.Warn("removed static gateways keep their entry in the lease of BFD sessions", "error", err)
	}
	return nil
}

// holdable puts static gateways under the lease. Without static gateways it ignores a failure to
// remove the table of an earlier configuration.
func (s *Supervisor) holdable(ctx context.Context, gateways []netip.Addr) error {
	err := s.lease.Gateways(ctx, gateways)
	if err != nil && len(gateways) == 0 && ctx.Err() == nil {
		s.options.Log.Warn("failed to remove the lease of BFD sessions", "error", err)
		return nil
	}
	return err
}

// replaceFile installs the staged file, which a restarted BIRD reads, if its check passed.
func (s *Supervisor) replaceFile(checkErr error) error {
	if checkErr != nil {
		checkErr = fmt.Errorf("failed to check BIRD's new configuration: %w", checkErr)
		return errors.Join(checkErr, os.Remove(s.stagedPath()))
	}
	if err := os.Rename(s.stagedPath(), s.configPath()); err != nil {
		return fmt.Errorf("failed to replace BIRD's configuration: %w", err)
	}
	return nil
}

func (s *Supervisor) awaitWrite() {
	if s.apply.written != nil {
		<-s.apply.written
		s.apply.written = nil
	}
}

func (s *Supervisor) configured() {
	s.apply.refused, s.apply.retries = nil, retries{}
	if s.state.Load().ConfigErr != nil {
		s.state.Update(func(st State) State { st.ConfigErr = nil; return st })
	}
}

// configFailed records a failure to configure BIRD. A configuration that BIRD refused is not
// retried.
func (s *Supervisor) configFailed(err error) {
	var refused *refusedError
	if errors.As(err, &refused) {
		s.apply.refused = s.apply.pending.content
	} else {
		s.apply.retries.failed(time.Now())
	}
	s.options.Log.Error("failed to configure BIRD; it keeps its previous configuration", "error", err)
	s.state.Update(func(st State) State { st.ConfigErr = err; st.ConfigFailures++; return st })
}

// prepare writes the configuration for a new BIRD process: the desired one or, if that fails, the
// last one that BIRD loaded.
func (s *Supervisor) prepare(ctx context.Context) error {
	a := &s.apply
	a.pending = s.resolver.result.Load()
	err := a.pending.err
	if err == nil && !bytes.Equal(a.pending.content, a.current.content) && !bytes.Equal(a.pending.content, a.refused) {
		if err = s.install(ctx, a.pending.content); err == nil {
			a.current = a.pending
			s.configured()
			return nil
		}
	}
	switch {
	case ctx.Err() != nil, a.current.content == nil:
		return err
	case err != nil:
		s.configFailed(err)
	}
	// Do not write an unchanged file: BIRD must be able to restart on a full or read-only disk.
	if b, err := os.ReadFile(s.configPath()); err == nil && bytes.Equal(b, a.current.content) {
		return nil
	}
	return durable.Replace(s.configPath(), a.current.content, 0o600)
}

// checkTimeout bounds `bird -p`, which takes 10 ms.
const checkTimeout = 10 * time.Second

// install checks a configuration with `bird -p` and moves it to configPath.
func (s *Supervisor) install(ctx context.Context, content []byte) error {
	path := s.stagedPath()
	if err := durable.Replace(path, content, 0o600); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, s.options.Executable, "-p", "-c", path)
	cmd.WaitDelay = time.Second // a child process of BIRD may keep the output open
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.Exited() {
		err = &refusedError{codeConfigFailed, string(bytes.TrimSpace(out))}
	}
	return s.replaceFile(err)
}
