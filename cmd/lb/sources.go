package main

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/pkg/lb"
	"github.com/vipgate/vipgate/pkg/registry"
	"github.com/vipgate/vipgate/pkg/targetset"
)

type targetFlags struct {
	Source        []string       `help:"Source of targets; repeatable, the targets of all sources are united: file (the trench file), registry (TargetService)." default:"file" placeholder:"file|registry" group:"Targets"`
	OnMissingFile string         `aliases:"on-file-gone" help:"What happens to the targets of the trench file while it cannot be read at all: hold, drain or drop. (With an invalid file the previous configuration stays in force.)" enum:"hold,drain,drop" default:"hold" group:"Targets"`
	TargetSubnet  []netip.Prefix `help:"Subnet that targets must be in, of the trench file and of registrations; repeatable. Absent: any but VIPs; registrations have no link-local or metadata addresses." placeholder:"PREFIX" group:"Targets"`
	StateDir      string         `help:"Directory for what survives a restart: drains by an operator, registrations, holds of the data plane, the last good configuration." default:"/run/vipgate/lb" type:"path" placeholder:"DIR" group:"Targets"`

	TargetID             []registry.Allowance `name:"target-id" help:"SPIFFE IDs that may register targets, of one stream or of all: [STREAM=]spiffe://TD/PATH, where * stands for one segment and a last ** for the rest; repeatable." placeholder:"[STREAM=]ID" group:"Registry"`
	TargetQuota          int                  `help:"How many targets one SPIFFE ID may register. The neighbor table of the node, of 1024 entries by default, must hold those of all IDs." default:"100" placeholder:"N" group:"Registry"`
	RegistryGrace        time.Duration        `help:"How long registered targets outlive the call that registered them." default:"5s" group:"Registry"`
	RegistrySettle       time.Duration        `help:"How long no new target must have registered before the VIPs of its stream rise for the first time; five times that at most. Longer than targets take to find a new lb by DNS; 0: the first target is enough." default:"6s" group:"Registry"`
	OnRegistrationExpiry string               `aliases:"on-registry-gone" help:"What happens to them after that: hold, drain or drop." enum:"hold,drain,drop" default:"drain" group:"Registry"`
	RegistryAddress      string               `help:"HOST:PORT on which the registry is also served, over TCP with the same mTLS." placeholder:"HOST:PORT" group:"Registry"`

	ProbeID     []spiffeid.ID `name:"probe-id" help:"SPIFFE ID that may report verdicts of vipgate-probe at --registry-address; repeatable." placeholder:"ID" group:"Probes"`
	ProbeQuorum int           `help:"How many of them must find a VIP dead before this pod de-prefers it." default:"2" placeholder:"N" group:"Probes"`

	WriteReadinessDir string `help:"Directory for readiness files that lb writes, for a router of Meridio 2 in the same pod." type:"path" placeholder:"DIR" group:"Readiness files"`
}

func parseMode(s string) (fs.FileMode, error) {
	n, err := strconv.ParseUint(s, 8, 32)
	if err == nil && n != 0o600 && n != 0o660 {
		err = errors.New("other users need no permissions")
	}
	return fs.FileMode(n), err
}

// checkProbes refuses a quorum that the probes cannot have, and probes that are targets.
func (f *targetFlags) checkProbes(r *cli.Refusals) {
	if len(f.ProbeID) == 0 {
		return
	}
	r.If(f.RegistryAddress == "", "--probe-id lets probes report over TCP: name the address with --registry-address")
	r.If(f.ProbeQuorum < 1 || f.ProbeQuorum > len(f.ProbeID),
		"--probe-quorum=%d: use 1 to %d, the number of --probe-id", f.ProbeQuorum, len(f.ProbeID))
	for i, id := range f.ProbeID {
		r.If(slices.Contains(f.ProbeID[:i], id), "--probe-id=%s: it occurs twice", id)
		r.If(registry.Allowances(f.TargetID).Authorizes(id), "--probe-id=%s: --target-id lets it register targets, too; "+
			"give probes IDs of their own", id)
	}
}

func (f *targetFlags) options() lb.TargetOptions {
	return lb.TargetOptions{
		File: slices.Contains(f.Source, "file"), OnFileGone: targetset.SourceGonePolicy(f.OnMissingFile),
		Registry: registry.Options{
			Off: !slices.Contains(f.Source, "registry"), Allow: f.TargetID, Quota: f.TargetQuota,
			Grace: f.RegistryGrace, OnGone: targetset.SourceGonePolicy(f.OnRegistrationExpiry),
		},
		RegistrySettle: f.RegistrySettle,
		RegistryAddr:   f.RegistryAddress, Subnets: f.TargetSubnet, StateDir: f.StateDir,
		WriteReadinessDir: f.WriteReadinessDir,
	}
}

// check refuses values that would fail later.
func (f *targetFlags) check(r *cli.Refusals) {
	for _, s := range f.Source {
		r.If(!slices.Contains([]string{"file", "registry"}, s), "--source=%s: write file or registry", s)
	}
	// A setting of the registry without --source=registry would have no effect.
	registry := slices.Contains(f.Source, "registry")
	r.If(len(f.Source) == 0, "--source is empty: name file or registry")
	r.If(f.StateDir == "", "--state-dir is empty: name a directory that survives a restart")
	r.If(f.TargetQuota < 1, "--target-quota=%d: at least 1", f.TargetQuota)
	r.Within("--registry-grace", f.RegistryGrace, 0, time.Hour)
	r.Within("--registry-settle", f.RegistrySettle, 0, time.Minute)
	r.If(registry && len(f.TargetID) == 0,
		"--source=registry lets no one register: name the SPIFFE IDs of targets with --target-id")
	const remedy = "the registry is not in use: add --source=registry, and --source=file to keep that"
	r.If(!registry && len(f.TargetID) > 0, "--target-id lets targets register, but %s", remedy)
	f.checkProbes(r)
	r.If(!registry && len(f.ProbeID) == 0 && f.RegistryAddress != "", "--registry-address serves the registry, but %s",
		remedy)
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
	// An empty host listens on all addresses, also toward the gateways.
	r.If(host == "", "--registry-address=%s names no address: write the pod's, which targets reach, never the external "+
		"interface's", f.RegistryAddress)
}
