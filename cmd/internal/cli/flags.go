package cli

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"strconv"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"

	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/logs"
)

// SPIFFEID is a flag that holds a SPIFFE ID.
type SPIFFEID struct{ spiffeid.ID }

// UnmarshalText implements encoding.TextUnmarshaler.
func (s *SPIFFEID) UnmarshalText(text []byte) error {
	id, err := spiffeid.FromString(string(text))
	if err != nil {
		return fmt.Errorf("%q is not a SPIFFE ID such as spiffe://example.org/frontend: %w", text, err)
	}
	s.ID = id
	return nil
}

// IDs returns the IDs of a list of flags.
func IDs(flags []SPIFFEID) []spiffeid.ID {
	var ids []spiffeid.ID
	for _, f := range flags {
		ids = append(ids, f.ID)
	}
	return ids
}

// TrustDomain is a flag that holds a trust domain.
type TrustDomain struct{ spiffeid.TrustDomain }

// UnmarshalText implements encoding.TextUnmarshaler.
func (t *TrustDomain) UnmarshalText(text []byte) error {
	td, err := spiffeid.TrustDomainFromString(string(text))
	if err != nil {
		return fmt.Errorf("%q is not a trust domain such as example.org: %w", text, err)
	}
	t.TrustDomain = td
	return nil
}

// Mode is a flag that holds the permissions of a socket.
type Mode fs.FileMode

// UnmarshalText implements encoding.TextUnmarshaler.
func (m *Mode) UnmarshalText(text []byte) error {
	n, err := strconv.ParseUint(string(text), 8, 32)
	if err != nil || (n != 0o600 && n != 0o660) {
		return fmt.Errorf("socket mode %q: only 0600, and 0660 for a group that both containers share, are allowed", text)
	}
	*m = Mode(n)
	return nil
}

// Identity is the group of flags that say who we are.
type Identity struct {
	Identity        string        `help:"Where our SVID comes from: spiffe (the Workload API; default when SPIFFE_ENDPOINT_SOCKET is set), files (--svid-dir), or dev (an authority of our own, for one machine)." placeholder:"spiffe|files|dev" group:"Identity"`
	SpiffeID        SPIFFEID      `name:"spiffe-id" help:"Our own SPIFFE ID; picks ours when several SVIDs are offered." placeholder:"ID" group:"Identity"`
	SvidDir         string        `help:"Directory with tls.crt, tls.key and ca.crt, for --identity=files." type:"path" placeholder:"DIR" group:"Identity"`
	DevAuthorityDir string        `help:"Directory of the development authority, for --identity=dev." type:"path" placeholder:"DIR" group:"Identity"`
	DevTTL          time.Duration `name:"dev-ttl" help:"Life of an SVID of the development authority, at least 2s." default:"1h" group:"Identity"`
}

// endpointSocket is the SPIFFE standard's variable for the Workload API.
const endpointSocket = "SPIFFE_ENDPOINT_SOCKET"

// Source returns the source of our SVID.
func (f Identity) Source(defaultID string, log *slog.Logger) (*identity.Source, error) {
	kind := f.Identity
	if kind == "" && os.Getenv(endpointSocket) != "" {
		kind = "spiffe"
	}
	o := identity.Options{ID: f.SpiffeID.ID, DevTTL: f.DevTTL, Log: log}
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
		id := f.SpiffeID.ID
		if id.IsZero() {
			id = spiffeid.RequireFromString(defaultID)
		}
		return identity.NewDev(f.DevAuthorityDir, id, o)
	case "":
		return nil, fmt.Errorf("no identity: set --identity=spiffe (the SPIFFE Workload API, with %s), --identity=files (with --svid-dir) or --identity=dev (with --dev-authority-dir, for one machine)", endpointSocket)
	}
	return nil, fmt.Errorf("--identity=%s: use spiffe, files or dev", kind)
}

// Check returns the error that Source would return. Unless lenient, it also refuses a
// missing SVID directory, for which a daemon waits. It logs nothing.
func (f Identity) Check(defaultID string, lenient bool) error {
	_, err := f.Source(defaultID, slog.New(slog.DiscardHandler))
	if err == nil && !lenient && f.Identity == "files" {
		if _, err := os.Stat(f.SvidDir + "/."); err != nil {
			return fmt.Errorf("--svid-dir=%s: %w; name the directory with tls.crt, tls.key and ca.crt", f.SvidDir, err)
		}
	}
	return err
}

// Log is the group of flags that say what is logged.
type Log struct {
	LogLevel  string `help:"Least level that is logged: debug, info, warn or error. SIGUSR1 logs more, SIGUSR2 goes back." default:"info" group:"Logging"`
	LogFormat string `help:"json or text." enum:"json,text" default:"json" group:"Logging"`
}

// Logger returns the logger, writing to stderr, and its level. With an error the logger discards.
func (f Log) Logger(debug bool) (*slog.Logger, *logs.Level, error) {
	level := f.LogLevel
	if debug {
		level = "debug"
	}
	log, l, err := logs.New(f.LogFormat, level, os.Stderr)
	if err != nil {
		return slog.New(slog.DiscardHandler), nil, fmt.Errorf("--log-level: %w", err)
	}
	return log, l, nil
}

// Listeners is the group of flags of the read-only listeners.
type Listeners struct {
	HealthHost  string `help:"Address of the gRPC health service, beside 127.0.0.1; never the external interface." default:"127.0.0.1" placeholder:"ADDR" group:"Listeners"`
	MetricsHost string `help:"Address of the Prometheus metrics, beside 127.0.0.1; never the external interface." default:"127.0.0.1" placeholder:"ADDR" group:"Listeners"`
}

// Address joins host and port.
func Address(host string, port uint16) string { return net.JoinHostPort(host, strconv.Itoa(int(port))) }
