package bird

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/files"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// surveyInterval is how often addresses and password files are looked at. A poll
// is enough: BIRD hears of lost links and addresses by itself, and a session
// waits for its connect delay of a second anyway once its address is there.
const surveyInterval = time.Second

// survey is the configuration that BIRD should have, as of one look around.
type survey struct {
	generation uint64 // of wanted; 0: nothing was wanted yet
	gateways   []trench.Gateway
	problems   map[string]string // by gateway, why it has no session
	input      RenderInput
	content    []byte
	err        error // of rendering; content is nil then
}

// surveyor makes surveys. It is a goroutine of its own since the kernel and the
// file system can take their time, and nothing that tells the state of sessions
// may wait for them.
type surveyor struct {
	options   Options
	wanted    *latest.Value[wanted]
	result    *latest.Value[survey]
	addresses func(name string) ([]ownAddress, error)

	// Owned by run.
	calls files.Calls // of password files
	picks map[pick]netip.Addr
	known []ownAddress // as of the last look that told something
	quiet bool         // the failing look was told
}

// pick is what an address of ours was picked for.
type pick struct {
	gateway string
	address netip.Addr
}

func newSurveyor(o Options, w *latest.Value[wanted]) *surveyor {
	return &surveyor{options: o, wanted: w, result: latest.New(survey{}), addresses: interfaceAddresses, picks: map[pick]netip.Addr{}}
}

// run publishes a survey whenever it says something else than the one before.
func (s *surveyor) run(ctx context.Context) {
	tick := time.NewTicker(surveyInterval)
	defer tick.Stop()
	for {
		w, changed := s.wanted.Get()
		if w.generation > 0 {
			if now, news := s.look(ctx, w, s.result.Load()); news && ctx.Err() == nil {
				s.result.Set(now)
			}
		}
		select {
		case <-changed:
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// look makes a survey and tells whether it differs from the one before. The text
// is made anew only if something changed, since there may be many VIPs.
func (s *surveyor) look(ctx context.Context, w wanted, before survey) (now survey, news bool) {
	now = survey{generation: w.generation, gateways: w.gateways}
	now.input = s.options.input(w.vips)
	now.input.Sessions, now.problems = s.resolve(ctx, w.gateways, before.input.Sessions)
	if before.generation == w.generation && slices.Equal(before.input.Sessions, now.input.Sessions) {
		now.content, now.err = before.content, before.err
		return now, !maps.Equal(before.problems, now.problems)
	}
	now.content, now.err = Render(now.input)
	return now, true
}

// input is the part of the configuration that never changes, and the VIPs.
func (o Options) input(vips []vip.VIP) RenderInput {
	in := RenderInput{
		RouterID: o.RouterID, Interface: o.Interface, LoopbackPort: o.LoopbackPort, Password: o.Password,
		TableID: o.TableID, ECMP: o.ECMP, ScanTime: o.KernelScanTime, VIPs: vips,
	}
	if o.LogFileSize > 0 {
		in.LogFile, in.LogFileSize = filepath.Join(o.Dir, "bird.log"), o.LogFileSize
	}
	return in
}

// resolve makes sessions of gateways. Those that cannot have one yet are
// returned with the reason. before are the sessions of the look before.
func (s *surveyor) resolve(ctx context.Context, gateways []trench.Gateway, before []Session) (sessions []Session, problems map[string]string) {
	own, err := s.own()
	problems = map[string]string{}
	picks := map[pick]netip.Addr{}
	for _, g := range gateways {
		if err != nil {
			problems[g.Name] = err.Error()
			continue
		}
		key := pick{g.Name, g.Address}
		local, problem := localFor(g.Address, s.picks[key], own)
		if problem != "" {
			problems[g.Name] = fmt.Sprintf("interface %s: %s", s.options.Interface, problem)
			continue
		}
		picks[key] = local
		password, err := s.password(ctx, g.PasswordFile)
		if i := slices.IndexFunc(before, func(b Session) bool { return b.Gateway.PasswordFile == g.PasswordFile }); i >= 0 && errors.Is(err, files.ErrHung) {
			password, err = before[i].Password, nil // a mount that hangs must not end the session
		}
		if err != nil {
			// Never an empty password: the session would come up unsigned.
			problems[g.Name] = err.Error()
			continue
		}
		sessions = append(sessions, Session{Gateway: g, Local: local, Password: password})
	}
	s.picks = picks
	return sessions, problems
}

// own returns our addresses. A look that failed tells nothing about them, so that
// what was known before still holds: sessions must not end for it.
func (s *surveyor) own() ([]ownAddress, error) {
	own, err := s.addresses(s.options.Interface)
	switch {
	case err == nil:
		s.known, s.quiet = own, false
	case errors.Is(err, errNoInterface) || s.known == nil:
		s.known = nil
		return nil, err
	case !s.quiet:
		s.quiet = true
		s.options.Log.Warn("our addresses could not be read; taking them to be as before", "interface", s.options.Interface, "error", err)
	}
	return s.known, nil
}

// maxPasswordFile bounds a password file.
const maxPasswordFile = 64 << 10

// password returns the password in a file, and none without a file.
func (s *surveyor) password(ctx context.Context, path string) (string, error) {
	if path == "" {
		return "", nil
	}
	b, err := files.Do(ctx, &s.calls, "password file "+path, func() ([]byte, error) { return files.Read(path, maxPasswordFile) })
	if errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("password file %s does not exist", path)
	}
	if err != nil {
		return "", fmt.Errorf("password file: %w", err)
	}
	password, err := ParsePassword(b)
	if err != nil {
		return "", fmt.Errorf("password file %s: %w", path, err)
	}
	return password, nil
}
