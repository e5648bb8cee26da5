package main

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/alecthomas/kong"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/pkg/frontend"
	"github.com/vipgate/vipgate/pkg/readinessfile"
)

// readinessFlags are the flags of a directory of readiness files, which takes the
// place of the load balancer's socket.
type readinessFlags struct {
	ReadinessDir        directoryFlag `help:"Directory of readiness files, as of Meridio 2 (/var/run/meridio), to go by instead of --lb-socket: lb-ready-STREAM and lb-vip-ready-ADDRESS." placeholder:"DIR" group:"Readiness files"`
	ReadinessDirMissing string        `help:"What VIPs are as long as the directory was never there: notready or ready." enum:"notready,ready" default:"notready" group:"Readiness files"`
	ReadinessMaxAge     time.Duration `help:"How long ago a file may have been touched to count; for writers that touch their files. 0: files count as long as they are there, also those of a writer that died." default:"0s" group:"Readiness files"`
	OnDirectoryGone     string        `help:"What happens to VIPs when the directory was there and cannot be read: hold, drain or drop them." enum:"hold,drain,drop" default:"drop" group:"Readiness files"`

	socketGiven bool // --lb-socket, by flag or variable
}

// directoryFlag is a directory; Given tells an empty one from none.
type directoryFlag struct {
	Path  string
	Given bool
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (d *directoryFlag) UnmarshalText(text []byte) error {
	*d = directoryFlag{Path: string(text), Given: true}
	return nil
}

// String returns the path.
func (d directoryFlag) String() string { return d.Path }

// AfterApply notes whether --lb-socket was given: it has a default.
func (c *runFlags) AfterApply(ctx *kong.Context) error {
	const name = "lb-socket"
	for _, p := range ctx.Path {
		if p.Flag != nil && p.Flag.Name == name {
			c.socketGiven = true
		}
	}
	for _, f := range ctx.Flags() {
		if f.Name != name {
			continue
		}
		for _, variable := range f.Envs {
			if _, given := os.LookupEnv(variable); given {
				c.socketGiven = true
			}
		}
	}
	return nil
}

// checkDirectory refuses what keeps us from the directory.
func (c *runFlags) checkDirectory(r *cli.Refusals) {
	switch dir := c.ReadinessDir.Path; {
	case dir == "":
		r.Add(fmt.Errorf("--readiness-dir: %w", frontend.ErrNoDirectory))
	case c.socketGiven:
		r.If(true, "--readiness-dir=%s and --lb-socket=%s exclude each other: name the one that says whether VIPs are ready", dir, c.LBSocket)
	default:
		r.If(!filepath.IsAbs(dir), "--readiness-dir=%s: write an absolute path, such as /var/run/meridio", dir)
	}
	r.MaxAge("--readiness-max-age", c.ReadinessMaxAge)
}

// directory are the options of the directory.
func (c *readinessFlags) directory(drainTime time.Duration, log *slog.Logger) *readinessfile.Options {
	return &readinessfile.Options{
		Path: c.ReadinessDir.Path, MissingReady: c.ReadinessDirMissing == "ready", MaxAge: c.ReadinessMaxAge,
		OnGone: readinessfile.GonePolicy(c.OnDirectoryGone), DrainTime: drainTime, Log: log,
	}
}
