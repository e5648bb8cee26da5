package bird

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

// configPath is not bird.conf: on a host with a BIRD of its own, that is its file.
func (s *Supervisor) configPath() string { return filepath.Join(s.options.Dir, "vipgate.conf") }

// stagedPath is where a configuration waits to be checked.
func (s *Supervisor) stagedPath() string { return s.configPath() + ".new" }

// application is the way of a survey into BIRD. Only files are written outside
// the loop that looks at BIRD, since a disk can be slow.
type application struct {
	current survey     // in force, and in the file
	pending survey     // being written
	written chan error // the result of writing pending; nil: nothing is
	refused []byte     // by BIRD: not tried again
	backoff backoff
}

// backoff spaces attempts at what failed for another reason than that BIRD
// refuses it, such as a full disk.
type backoff struct {
	failures  int
	notBefore time.Time
}

func (b *backoff) failed(now time.Time) {
	b.failures++
	b.notBefore = now.Add(min(time.Second<<min(b.failures-1, 5), 30*time.Second))
}

// stage begins to write the configuration of the newest survey if it is not the
// one in force.
func (s *Supervisor) stage() {
	a, v := &s.apply, s.surveyor.result.Load()
	switch {
	case a.written != nil:
		return // one at a time; the end of this one brings us here again
	case v.err == nil && bytes.Equal(v.content, a.current.content):
		a.current = v
		s.configured()
		return
	case time.Now().Before(a.backoff.notBefore), v.err == nil && bytes.Equal(v.content, a.refused):
		return
	case v.err != nil:
		s.configFailed(v.err)
		return
	}
	written, path := make(chan error, 1), s.stagedPath()
	a.pending, a.written = v, written
	go func() { written <- replaceFile(path, v.content, 0o600) }()
}

// staged gives BIRD the configuration that was written. A refused one leaves the
// old one in force. It tells whether BIRD has another one now.
func (s *Supervisor) staged(ctx context.Context, err error) bool {
	a := &s.apply
	a.written = nil
	if err == nil {
		err = s.reconfigure(ctx)
	}
	switch {
	case ctx.Err() != nil:
		return false
	case err != nil:
		s.configFailed(err)
		return false
	}
	a.current = a.pending
	s.configured()
	s.options.Log.Info("BIRD has another configuration", "gateways", len(a.current.input.Sessions), "without_session", len(a.current.problems))
	s.eager.begin(time.Now())
	s.state.Update(func(st State) State { st.Configures++; return st })
	return true
}

// reconfigure checks the new file first: after a refused `configure` the file on
// disk would not be the one in force.
func (s *Supervisor) reconfigure(ctx context.Context) error {
	if _, err := s.command(ctx, `configure check "`+s.stagedPath()+`"`); err != nil {
		return errors.Join(fmt.Errorf("check of BIRD's new configuration: %w", err), os.Remove(s.stagedPath()))
	}
	if err := os.Rename(s.stagedPath(), s.configPath()); err != nil {
		return fmt.Errorf("configuration of BIRD: %w", err)
	}
	if _, err := s.command(ctx, `configure "`+s.configPath()+`"`); err != nil {
		return fmt.Errorf("BIRD did not take the new configuration: %w", err)
	}
	return nil
}

// settle waits for a file that is being written.
func (s *Supervisor) settle() {
	if s.apply.written != nil {
		<-s.apply.written
		s.apply.written = nil
	}
}

// configured notes that the configuration in force is the wanted one.
func (s *Supervisor) configured() {
	s.apply.refused, s.apply.backoff = nil, backoff{}
	if s.state.Load().ConfigErr != nil {
		s.state.Update(func(st State) State { st.ConfigErr = nil; return st })
	}
}

// configFailed notes that it is not. What BIRD refused is not tried again.
func (s *Supervisor) configFailed(err error) {
	var refused *RefusedError
	if errors.As(err, &refused) {
		s.apply.refused = s.apply.pending.content
	} else {
		s.apply.backoff.failed(time.Now())
	}
	s.options.Log.Error("BIRD keeps its old configuration", "error", err)
	s.state.Update(func(st State) State { st.ConfigErr = err; st.ConfigFailures++; return st })
}

// prepare writes the configuration for a BIRD that is to be started: the wanted
// one, or, if that cannot be, the one that was in force before.
func (s *Supervisor) prepare(ctx context.Context) error {
	a := &s.apply
	a.pending = s.surveyor.result.Load()
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
	return ensureFile(s.configPath(), a.current.content, 0o600)
}

// checkTimeout bounds `bird -p`, which takes 10 ms.
const checkTimeout = 10 * time.Second

// install has BIRD parse a configuration without starting it, and puts it in place.
func (s *Supervisor) install(ctx context.Context, content []byte) error {
	path := s.stagedPath()
	if err := replaceFile(path, content, 0o600); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	out, err := exec.CommandContext(ctx, s.options.Executable, "-p", "-c", path).CombinedOutput()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.Exited() {
		err = &RefusedError{codeConfigFailed, string(bytes.TrimSpace(out))}
	}
	if err != nil {
		return errors.Join(fmt.Errorf("check of BIRD's configuration: %w", err), os.Remove(path))
	}
	if err := os.Rename(path, s.configPath()); err != nil {
		return fmt.Errorf("configuration of BIRD: %w", err)
	}
	return nil
}
