package frontendcmd

import (
	"fmt"
	"log/slog"
	"path/filepath"
	"time"

	"github.com/alecthomas/kong"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/pkg/frontend"
	"github.com/vipgate/vipgate/pkg/readinessfile"
)

// readinessFlags are the flags of a directory of readiness files, used in place of the lb's socket.
type readinessFlags struct {
	ReadinessDir        *string       `help:"Directory of readiness files, as of Meridio 2 (/var/run/meridio), that replaces --lb-socket: lb-ready-STREAM and lb-vip-ready-ADDRESS." placeholder:"DIR" group:"Readiness files"`
	ReadinessDirMissing string        `help:"Readiness of VIPs until the directory exists for the first time: notready or ready." enum:"notready,ready" default:"notready" group:"Readiness files"`
	ReadinessMaxAge     time.Duration `help:"Maximum age of a file, for writers that touch their files. 0: files count as long as they exist, also those of a writer that died." default:"0s" group:"Readiness files"`
	OnMissingDirectory  string        `aliases:"on-directory-gone" help:"What happens to VIPs when the directory existed and cannot be read: hold, drain or drop them." enum:"hold,drain,drop" default:"drop" group:"Readiness files"`

	socketGiven bool // --lb-socket is set by flag or variable
}

// AfterApply records whether the user set --lb-socket, which its default would hide.
func (f *Flags) AfterApply(parsed *kong.Context) error {
	f.socketGiven = cli.Given(parsed, "lb-socket")
	return nil
}

func (f *Flags) checkDirectory(r *cli.Refusals) {
	switch dir := *f.ReadinessDir; {
	case dir == "":
		r.Add(fmt.Errorf("--readiness-dir: %w", frontend.ErrNoDirectory))
	// The default of --lb-socket is always set, so only an explicit one conflicts.
	case f.socketGiven:
		r.Add(fmt.Errorf("--readiness-dir=%s and --lb-socket=%s exclude each other: name one source of readiness",
			dir, f.LBSocket))
	default:
		r.If(!filepath.IsAbs(dir), "--readiness-dir=%s: write an absolute path, such as /var/run/meridio", dir)
	}
	const age = "--readiness-max-age"
	r.Within(age, f.ReadinessMaxAge, 0, 24*time.Hour)
	r.If(f.ReadinessMaxAge > 0 && f.ReadinessMaxAge < readinessfile.MinMaxAge, "%s=%v: at least %v, since files are "+
		"touched once a second and some file systems round times to two; or 0 for any age",
		age, f.ReadinessMaxAge, readinessfile.MinMaxAge)
}

func (f *readinessFlags) directory(drainTime time.Duration, log *slog.Logger) *readinessfile.Options {
	return &readinessfile.Options{
		Path: *f.ReadinessDir, MissingReady: f.ReadinessDirMissing == "ready", MaxAge: f.ReadinessMaxAge,
		OnGone: readinessfile.DirectoryGonePolicy(f.OnMissingDirectory), DrainTime: drainTime, Log: log,
	}
}
