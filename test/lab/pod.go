package lab

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
)

// Pod is a trench pod: an lb and a frontend with its BIRD.
type Pod struct {
	Lab      *Lab
	Binaries string // the folder of lb and frontend
	NS       *NetNS // its namespace; nil for the lab's pod namespace
	Dir      string // its folder; "" for the lab's
	LB       *Process
	Frontend *Process
	// ProductTimers leaves the timers of lb and frontend at their defaults, for measurements.
	ProductTimers bool

	replaced int // number of replacements, in a Topology
}

// Namespace returns the pod's network namespace.
func (p *Pod) Namespace() *NetNS {
	if p.NS == nil {
		return p.Lab.Pod
	}
	return p.NS
}

// dir returns the pod's folder.
func (p *Pod) dir() string {
	if p.Dir == "" {
		return p.Lab.Dir
	}
	return p.Dir
}

// Ports of the pod, free in its namespace by construction.
const (
	LBHealth        = "127.0.0.1:7781"
	FrontendHealth  = "127.0.0.1:7780"
	LBMetrics       = "127.0.0.1:2223"
	FrontendMetrics = "127.0.0.1:2224"
)

// Paths of the pod.
func (p *Pod) TrenchFile() string    { return filepath.Join(p.dir(), "trench", "trench.yaml") }
func (p *Pod) Socket() string        { return filepath.Join(p.dir(), "lb.sock") }
func (p *Pod) LBAdmin() string       { return filepath.Join(p.dir(), "lb-admin.sock") }
func (p *Pod) FrontendAdmin() string { return filepath.Join(p.dir(), "fe-admin.sock") }
func (p *Pod) Authority() string     { return filepath.Join(p.dir(), "authority") }
func (p *Pod) BirdDir() string       { return filepath.Join(p.dir(), "bird") }
func (p *Pod) StateDir() string      { return filepath.Join(p.dir(), "state") }
func (p *Pod) BirdSocket() string    { return filepath.Join(p.dir(), "bird.ctl") }

// WriteTrench replaces the trench file as an editor does, by a rename.
func (p *Pod) WriteTrench(text string) error {
	path := p.TrenchFile()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return fmt.Errorf("trench file: %w", err)
	}
	if err := os.WriteFile(path+".new", []byte(text), 0o644); err != nil {
		return fmt.Errorf("trench file: %w", err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		return fmt.Errorf("trench file: %w", err)
	}
	return nil
}

// LBArgs returns the arguments of `lb run` in this pod.
func (p *Pod) LBArgs(extra ...string) []string {
	return append(p.arguments("lb", LBTimers,
		"--trench-file="+p.TrenchFile(), "--socket=unix://"+p.Socket(), "--admin-socket=unix://"+p.LBAdmin(),
		"--identity=dev", "--dev-authority-dir="+p.Authority(), "--spiffe-id="+LBID,
		"--frontend-id="+FrontendID, "--reader-id="+OperatorID, "--state-dir="+p.StateDir(), "--log-format=text",
	), extra...)
}

// FrontendArgs returns the arguments of `frontend run` in this pod.
func (p *Pod) FrontendArgs(extra ...string) []string {
	return p.frontendArgs("frontend", append([]string{"--trench-file=" + p.TrenchFile()}, extra...))
}

// frontendArgs returns the arguments of `PROGRAM run` in this pod.
func (p *Pod) frontendArgs(program string, extra []string) []string {
	return append(p.arguments(program, FrontendTimers,
		"--lb-socket=unix://"+p.Socket(),
		"--admin-socket=unix://"+p.FrontendAdmin(),
		"--identity=dev", "--dev-authority-dir="+p.Authority(), "--spiffe-id="+FrontendID, "--lb-id="+LBID,
		"--external-interface="+External, "--bird-dir="+p.BirdDir(), "--bird-socket="+
			p.BirdSocket(), "--log-format=text",
	), extra...)
}

// arguments returns the command `PROGRAM run` with its timers, unless the product's apply, and with
// further arguments. A later flag of the same name replaces a timer.
func (p *Pod) arguments(program string, timers []string, more ...string) []string {
	command := []string{filepath.Join(p.Binaries, program), "run"}
	if !p.ProductTimers {
		command = append(command, timers...)
	}
	return append(command, more...)
}

// StartLB starts the lb.
func (p *Pod) StartLB(extra ...string) (err error) {
	p.LB, err = p.Lab.startIn(p.dir(), p.Namespace(), "lb", p.LBArgs(extra...)...)
	return err
}

// StartFrontend starts the frontend.
func (p *Pod) StartFrontend(extra ...string) (err error) {
	p.Frontend, err = p.Lab.startIn(p.dir(), p.Namespace(), "frontend", p.FrontendArgs(extra...)...)
	return err
}

// StartMeridioFrontend starts meridio-frontend, without the paths of Meridio's pod, for an
// attractor at an NSP.
func (p *Pod) StartMeridioFrontend(nsp, trench, attractor string, extra ...string) (err error) {
	p.Frontend, err = p.Lab.startIn(p.dir(), p.Namespace(), "frontend", p.frontendArgs("meridio-frontend", append([]string{
		"--nsp-service=" + nsp, "--trench-name=" + trench, "--attractor-name=" + attractor, "--health-socket=",
		"--bird-log-file-size=0", "--metrics-address=127.0.0.1", "--identity-cache=",
	}, extra...))...)
	return err
}

// Run runs lb or frontend with a sub-command in the pod and returns its output.
func (p *Pod) Run(ctx context.Context, program string, args ...string) (string, error) {
	return p.Namespace().Run(ctx, filepath.Join(p.Binaries, program), args...)
}
