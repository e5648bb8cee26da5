package cli

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/logs"
	"github.com/vipgate/vipgate/pkg/process"
)

// Identity is the group of flags of the process's own SVID.
type Identity struct {
	Identity        string        `help:"Source of the own SVID: spiffe (the Workload API; default when SPIFFE_ENDPOINT_SOCKET is set), files (--svid-dir), dev (a development authority, for one machine), or peer-credentials (none: the users of processes on one host, over unix sockets)." placeholder:"spiffe|files|dev|peer-credentials" group:"Identity"`
	SpiffeID        spiffeid.ID   `name:"spiffe-id" help:"Own SPIFFE ID; selects one of several offered SVIDs." placeholder:"ID" group:"Identity"`
	SvidDir         string        `help:"Directory with tls.crt, tls.key and ca.crt, for --identity=files." type:"path" placeholder:"DIR" group:"Identity"`
	DevAuthorityDir string        `help:"Directory of the development authority, for --identity=dev." type:"path" placeholder:"DIR" group:"Identity"`
	DevTTL          time.Duration `name:"dev-ttl" help:"Lifetime of an SVID of the development authority, at least 2s." default:"1h" group:"Identity"`
}

// endpointSocket is the SPIFFE standard's variable for the Workload API.
const endpointSocket = "SPIFFE_ENDPOINT_SOCKET"

// CachedIdentity is [Identity] with a cache of the SVID for restarts. Only one process may write
// the cache file, so client commands do not have this flag.
type CachedIdentity struct {
	Identity
	IdentityCache string `help:"File in which the SVID of the Workload API, its key and the bundles are kept, in a memory file system: a restart uses them until their end while the Workload API does not answer or refuses. None when absent or empty." default:"${identity_cache}" placeholder:"FILE" group:"Identity"`
}

// Source returns the source of the own SVID.
func (f CachedIdentity) Source(defaultID string, log *slog.Logger) (*identity.Source, error) {
	return f.source(defaultID, f.IdentityCache, log)
}

// Source returns the source of the own SVID.
func (f Identity) Source(defaultID string, log *slog.Logger) (*identity.Source, error) {
	return f.source(defaultID, "", log)
}

func (f Identity) source(defaultID, cache string, log *slog.Logger) (*identity.Source, error) {
	kind := f.Identity
	// The standard's variable selects the Workload API, as in other SPIFFE programs.
	if kind == "" && os.Getenv(endpointSocket) != "" {
		kind = "spiffe"
	}
	o := identity.Options{ID: f.SpiffeID, Cache: cache, DevTTL: f.DevTTL, Log: log}
	switch kind {
	case "spiffe":
		return identity.NewWorkloadAPI(o)
	case "files":
		if f.SvidDir == "" {
			return nil, errors.New("--identity=files needs --svid-dir, the directory with tls.crt, tls.key and ca.crt")
		}
		return identity.NewFiles(f.SvidDir, o)
	case "dev":
		if f.DevAuthorityDir == "" {
			return nil, errors.New("--identity=dev needs --dev-authority-dir, a directory that lb and frontend share")
		}
		return identity.NewDev(f.DevAuthorityDir, cmp.Or(f.SpiffeID, spiffeid.RequireFromString(defaultID)), o)
	case peerCredentials:
		return identity.NewPeerCredentials(o)
	case "":
		return nil, fmt.Errorf("no identity: set --identity=spiffe (the SPIFFE Workload API, with %s), "+
			"--identity=files (with --svid-dir), --identity=dev (with --dev-authority-dir, for one machine) or "+
			"--identity=peer-credentials (for one host)", endpointSocket)
	}
	return nil, fmt.Errorf("--identity=%s: use spiffe, files, dev or peer-credentials", kind)
}

// peerCredentials is the value of --identity for processes that know each other by their users.
const peerCredentials = "peer-credentials"

// Peers are the flags that name the peers of one role: flag-id, flag-trust-domain and flag-uid.
type Peers struct {
	Flag        string // "--frontend"
	IDs         []spiffeid.ID
	TrustDomain spiffeid.TrustDomain
	UIDs        []uint32
}

// Peers returns the IDs of the peers of a role. With --identity=peer-credentials they are users,
// and the own one if none is named.
func (f Identity) Peers(r *Refusals, peers Peers) []spiffeid.ID {
	if f.Identity != peerCredentials {
		r.If(len(peers.UIDs) > 0, "%s-uid needs --identity=peer-credentials; use %[1]s-id", peers.Flag)
		r.If(len(peers.IDs) == 0 && peers.TrustDomain.IsZero(), "%s-id is required: no SPIFFE ID is authorized", peers.Flag)
		return peers.IDs
	}
	r.If(len(peers.IDs) > 0 || !peers.TrustDomain.IsZero(),
		"%s-id and %[1]s-trust-domain conflict with --identity=peer-credentials, which has no SVIDs; use %[1]s-uid",
		peers.Flag)
	if len(peers.UIDs) == 0 {
		return []spiffeid.ID{identity.UserID(uint32(os.Geteuid()))}
	}
	var users []spiffeid.ID
	for _, uid := range peers.UIDs {
		r.If(uid == identity.UnmappedUser, "%s-uid=%d is the user of all processes whose own one is not mapped",
			peers.Flag, uid)
		users = append(users, identity.UserID(uid))
	}
	return users
}

// PeerCredentials reports whether the process has no SVID.
func (f Identity) PeerCredentials() bool { return f.Identity == peerCredentials }

// Check returns the error that Source would return. Unless lenient, it also refuses a
// missing SVID directory, for which a daemon waits. It logs nothing.
func (f Identity) Check(defaultID string, lenient bool) error {
	_, err := f.Source(defaultID, slog.New(slog.DiscardHandler))
	// "/." also refuses a file: only a directory has this entry.
	if err == nil && !lenient && f.Identity == "files" {
		if _, err := os.Stat(f.SvidDir + "/."); err != nil {
			return fmt.Errorf("--svid-dir=%s: %w; name the directory with tls.crt, tls.key and ca.crt", f.SvidDir, err)
		}
	}
	return err
}

// Log is the group of logging flags.
type Log struct {
	LogLevel  string `help:"Lowest level that is logged: debug, info, warn or error. SIGUSR1 logs more, SIGUSR2 reverts that." default:"info" group:"Logging"`
	LogFormat string `help:"json or text." enum:"json,text" default:"json" group:"Logging"`
}

// Logger returns a logger that writes to stderr, and its level. With an unknown level, which
// [Process.Check] refuses, the logger discards everything.
func (f Log) Logger(stderr *logs.Writer) (*slog.Logger, *logs.Level) {
	log, level, err := stderr.Logger(f.LogFormat, f.LogLevel)
	if err != nil {
		return slog.New(slog.DiscardHandler), nil
	}
	return log, level
}

// Process is the group of flags of a program that runs.
type Process struct {
	Listeners
	Log
}

// Check refuses unusable addresses, ports that another listener uses, and an unknown level.
func (f *Process) Check(r *Refusals, other Port) {
	_, _, err := logs.New(f.LogFormat, f.LogLevel, io.Discard)
	r.If(err != nil, "--log-level: %w", err)
	r.Socket("--admin-socket", f.AdminSocket)
	r.If(!f.HealthAddress.IsValid(), "--health-address is empty: probes need a known one, such as 127.0.0.1")
	r.Ports(Port{"--health-address", f.HealthAddress.Port()}, Port{"--metrics-address", f.MetricsAddress.Port()}, other)
}

// Settings returns the settings of the process.
func (f *Process) Settings(stderr *logs.Writer) process.Settings {
	log, level := f.Logger(stderr)
	return process.Settings{
		Version: Version(), AdminSocket: f.AdminSocket, HealthAddr: f.HealthAddress.String(),
		MetricsAddr: f.MetricsAddress.String(), Log: log, Level: level, LostLines: stderr.Lost,
	}
}

// Listeners is the group of flags of the listeners.
type Listeners struct {
	AdminSocket    string  `help:"Unix socket for status, grpcurl and pprof." default:"${admin_socket}" placeholder:"SOCKET" group:"Listeners"`
	HealthAddress  Address `help:"Address of the gRPC health service, beside 127.0.0.1; ${health_scope}." default:"${health_address}" placeholder:"ADDR[:PORT]" group:"Listeners"`
	MetricsAddress Address `help:"Address of the Prometheus metrics, beside 127.0.0.1; never the external interface. None when empty." default:"${metrics_address}" placeholder:"ADDR[:PORT]" group:"Listeners"`
}

// Address is the address of a listener; the zero Address disables it.
type Address struct{ netip.AddrPort }

// parseAddress parses an address whose port may be missing, and then is the default.
func parseAddress(text string, port uint16) (Address, error) {
	if text == "" {
		return Address{}, nil
	}
	if addr, err := netip.ParseAddr(text); err == nil {
		return Address{netip.AddrPortFrom(addr, port)}, nil
	}
	at, err := netip.ParseAddrPort(text)
	if err == nil && at.Port() == 0 {
		err = errors.New("its port is 0, and the service needs a known one")
	}
	return Address{at}, err
}

// String returns the address, or "" if the listener is disabled.
func (a Address) String() string {
	if !a.IsValid() {
		return ""
	}
	return a.AddrPort.String()
}

// DrainEnd is the flag of a drain that ends by itself.
type DrainEnd struct {
	For *time.Duration `help:"The drain ends by itself after this time; absent: it lasts until it is undrained." placeholder:"DURATION" env:"-"`
}

// NotNegative returns the value of an optional flag; nil if it is absent.
func NotNegative(flag string, value *time.Duration) (*durationpb.Duration, error) {
	switch {
	case value == nil:
		return nil, nil
	case *value < 0:
		return nil, Usage("%s=%v must not be negative", flag, *value)
	}
	return durationpb.New(*value), nil
}

// EndsAfter returns the time after which the drain ends; nil for never.
func (f DrainEnd) EndsAfter() (*durationpb.Duration, error) {
	switch {
	case f.For == nil:
		return nil, nil
	case *f.For <= 0:
		return nil, Usage("--for=%v must be positive", *f.For)
	}
	return durationpb.New(*f.For), nil
}
