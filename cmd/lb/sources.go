package main

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/pkg/lb"
	"github.com/vipgate/vipgate/pkg/outage"
	"github.com/vipgate/vipgate/pkg/registry"
	"github.com/vipgate/vipgate/pkg/targetset"
)

// targetFlags say where targets come from.
type targetFlags struct {
	Source       []string       `help:"Source of targets; repeatable, the targets of all sources are united: file (the trench file), registry (TargetService)." default:"file" placeholder:"file|registry" group:"Targets"`
	OnFileGone   string         `help:"What happens to the targets of the trench file while it cannot be read at all: hold, drain or drop. (A bad file leaves in force what was.)" enum:"hold,drain,drop" default:"hold" group:"Targets"`
	TargetSubnet []prefixFlag   `help:"Subnet in which targets may be; repeatable. Absent: anywhere but in a VIP." placeholder:"PREFIX" group:"Targets"`
	StateDir     string         `help:"Directory for what survives a restart: drains by an operator, registrations, holds of the data plane." default:"/run/vipgate/lb" type:"path" placeholder:"DIR" group:"Targets"`
	SuddenLoss   outage.Percent `help:"Suspect an outage of the target network when more than this share of all targets, of 10 at least, fails within one check interval without an answer; such as 80%." default:"off" placeholder:"SHARE" group:"Targets"`
	OnSuddenLoss string         `help:"What follows from a suspected outage: withdraw (as always, with the reason SUSPECT) or hold (the targets count as ready)." enum:"withdraw,hold" default:"withdraw" group:"Targets"`

	TargetID        []registry.Allowance `name:"target-id" help:"SPIFFE IDs that may register targets, of one stream or of all: [STREAM=]spiffe://TD/PATH, where * stands for one segment and a last ** for the rest; repeatable." placeholder:"[STREAM=]ID" group:"Registry"`
	TargetQuota     int                  `help:"How many targets one SPIFFE ID may register. The neighbor table of the node, of 1024 entries by default, must hold those of all IDs." default:"100" placeholder:"N" group:"Registry"`
	RegistryGrace   time.Duration        `help:"How long registered targets outlive the call that registered them." default:"5s" group:"Registry"`
	OnRegistryGone  string               `help:"What happens to them after that: hold, drain or drop." enum:"hold,drain,drop" default:"drain" group:"Registry"`
	RegistryAddress string               `help:"HOST:PORT on which the registry is also served, over TCP with the same mTLS." placeholder:"HOST:PORT" group:"Registry"`

	WriteReadinessDir string `help:"Directory for readiness files that lb writes, for a router of Meridio 2 in the same pod." type:"path" placeholder:"DIR" group:"Readiness files"`
}

// prefixFlag is a subnet.
type prefixFlag struct{ netip.Prefix }

// UnmarshalText implements encoding.TextUnmarshaler.
func (p *prefixFlag) UnmarshalText(text []byte) error {
	prefix, err := netip.ParsePrefix(string(text))
	if err != nil {
		return fmt.Errorf("%q is not a subnet such as 172.16.0.0/16: %w", text, err)
	}
	if prefix != prefix.Masked() {
		return fmt.Errorf("%q has bits behind its length: write %s", text, prefix.Masked())
	}
	p.Prefix = prefix
	return nil
}

func (f *targetFlags) options() lb.TargetOptions {
	o := lb.TargetOptions{
		Sources: lb.Sources{
			File: slices.Contains(f.Source, "file"), Registry: slices.Contains(f.Source, "registry"),
		},
		OnFileGone: targetset.GonePolicy(f.OnFileGone), OnRegistryGone: targetset.GonePolicy(f.OnRegistryGone),
		StateDir: f.StateDir,
		Allow:    f.TargetID, Quota: f.TargetQuota, Grace: f.RegistryGrace, RegistryAddr: f.RegistryAddress,
		WriteReadinessDir: f.WriteReadinessDir,
		Outage:            outage.Options{Threshold: f.SuddenLoss, Hold: f.OnSuddenLoss == "hold"},
	}
	for _, p := range f.TargetSubnet {
		o.Subnets = append(o.Subnets, p.Prefix)
	}
	return o
}

// check refuses what would only fail later.
func (f *targetFlags) check(r *cli.Refusals) {
	for _, s := range f.Source {
		r.If(!slices.Contains([]string{"file", "registry"}, s), "--source=%s: write file or registry", s)
	}
	registry := slices.Contains(f.Source, "registry")
	r.If(len(f.Source) == 0, "--source is empty: name file or registry")
	r.If(f.StateDir == "", "--state-dir is empty: name a directory that a restarted lb finds again")
	r.If(f.TargetQuota < 1, "--target-quota=%d: at least 1", f.TargetQuota)
	r.Within("--registry-grace", f.RegistryGrace, 0, cli.MaxGrace)
	r.If(registry && len(f.TargetID) == 0, "--source=registry lets no one register: name the SPIFFE IDs of targets with --target-id")
	r.If(!registry && len(f.TargetID) > 0, "--target-id lets targets register, but the registry is not in use: add --source=registry, and --source=file to keep that")
	r.If(!registry && f.RegistryAddress != "", "--registry-address serves the registry, but that is not in use: add --source=registry, and --source=file to keep that")
	if f.RegistryAddress == "" {
		return
	}
	host, port, err := net.SplitHostPort(f.RegistryAddress)
	if err != nil {
		r.Add(fmt.Errorf("--registry-address=%s: write HOST:PORT: %w", f.RegistryAddress, err))
		return
	}
	n, err := strconv.ParseUint(port, 10, 16)
	r.If(err != nil || n == 0, "--registry-address=%s: %q is not a port, 1 to 65535", f.RegistryAddress, port)
	r.If(host == "", "--registry-address=%s names no address: write the pod's, which targets reach, never the external interface's", f.RegistryAddress)
}
