package main

import (
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"

	"github.com/vipgate/vipgate/pkg/frontend"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/process"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/identitytest"
)

// nspVariables returns the variables that name the NSP.
func nspVariables(t *testing.T) map[string]string {
	t.Helper()
	return map[string]string{
		"VIPGATE_NSP_SERVICE": "nsp-service-trench-a.default:7778", "VIPGATE_TRENCH_NAME": "trench-a",
		"VIPGATE_ATTRACTOR_NAME": "attractor-a-1", "VIPGATE_MAX_BACKOFF": "5s", "VIPGATE_BIRD_DIR": t.TempDir(),
		"SPIFFE_ENDPOINT_SOCKET": "unix:///run/spire/sockets/agent.sock",
	}
}

// runOptions returns the options of `run` with these arguments and variables.
func runOptions(t *testing.T, variables map[string]string, arguments ...string) (frontend.Options, error) {
	t.Helper()
	adopted(t, variables)
	line := &commandLine{}
	if _, err := parserOf(t, line).Parse(append([]string{"run"}, arguments...)); err != nil {
		t.Fatal(err)
	}
	return line.Run.options(process.Settings{Log: slog.New(slog.DiscardHandler)})
}

func TestOptionsOfMeridioPod(t *testing.T) {
	for _, arguments := range []string{"", "--gating=off", "--readiness-dir=/var/run/meridio"} {
		o, err := runOptions(t, nspVariables(t), strings.Fields(arguments)...)
		harness.Must(t, err)
		if o.SourceName != "NSP nsp-service-trench-a.default:7778" || o.StaleCondition != "NSPCli" || o.Identity == nil ||
			o.HealthSocket == "" || len(o.Collectors) != 1 || o.Fallback == nil {
			t.Errorf("%s: %+v", arguments, o)
		}
	}
	variables := nspVariables(t)
	line := &commandLine{}
	adopted(t, variables)
	if _, err := parserOf(t, line).Parse([]string{"run"}); err != nil {
		t.Fatal(err)
	}
	n := line.Run.nspOptions(nil, "pod-1", slog.New(slog.DiscardHandler))
	if n.Target != "nsp-service-trench-a.default:7778" || n.Trench != "trench-a" || n.Attractor != "attractor-a-1" ||
		n.Cache != filepath.Join(variables["VIPGATE_BIRD_DIR"], "nsp.json") || n.Host != "pod-1" ||
		n.MaxBackoff != 5*time.Second || n.EntryTimeout != 30*time.Second || n.Defaults != trench.DefaultDefaults() {
		t.Errorf("the options are %+v", n)
	}
}

func TestFlagsThatCannotWorkAreRefused(t *testing.T) {
	for line, want := range map[string]string{
		"--nsp-service=":               "--nsp-service=: write host and port",
		"--nsp-service=nsp":            "--nsp-service=nsp: write host and port",
		"--nsp-service=nsp:0":          "--nsp-service=nsp:0: write host and port",
		"--nsp-service=:7778":          "--nsp-service=:7778: write host and port",
		"--trench-name=a/b":            "--trench-name=a/b: write 1 to 60",
		"--attractor-name=":            "--attractor-name=: write 1 to 60",
		"--namespace=A":                "--namespace=",
		"--nsp-entry-timeout=2m":       "--nsp-entry-timeout=2m0s: at most 1m0s",
		"--nsp-keepalive-time=-1s":     "--nsp-keepalive-time=-1s must not be negative",
		"--vrrp=fe80::1%eth0":          "--vrrp=fe80::1%eth0: write the address of a router",
		"--vrrp=0.0.0.0":               "--vrrp=0.0.0.0: write the address of a router",
		"--health-socket=tcp://a:1":    "--health-socket",
		"--local-as=0":                 "default local AS number is 0",
		"--bgp-hold-time=1s":           "default hold time is 1s: BGP wants whole seconds between",
		"--bgp-local-port=0":           "default BGP ports 0 ",
		"--identity=files":             "--svid-dir",
		"--bird-kernel-scan-time=10ms": "--bird-kernel-scan-time=10ms: at least 1s",
	} {
		t.Run(line, func(t *testing.T) {
			_, err := runOptions(t, nspVariables(t), strings.Fields(line)...)
			harness.WantError(t, err, want)
		})
	}
}

// Without a flag, any member of the frontend's trust domain can be the load
// balancer. A flag restricts it to the named identities.
func TestAuthorization(t *testing.T) {
	ca, foreign := identitytest.NewCA(t, "example.org"), identitytest.NewCA(t, "example.com")
	own := ca.Source(ca.SVID(ca.ID("/ns/default/sa/frontend"), time.Hour))
	log := slog.New(slog.DiscardHandler)
	c := &runCommand{}
	member := c.authorizeLB(own, log)
	harness.Check(t, member(ca.ID("/ns/default/sa/lb"), nil))
	harness.WantError(t, member(foreign.ID("/lb"), nil), "trust domain example.org")
	c.LBID = append(c.LBID, ca.ID("/lb"))
	if err := c.authorizeLB(own, log)(ca.ID("/other"), nil); err == nil {
		t.Error("--lb-id is ignored")
	}
	// A trust domain from a flag replaces the frontend's trust domain.
	named := &runCommand{}
	named.LBTrustDomain = foreign.ID("/lb").TrustDomain()
	authorize := named.authorizeLB(own, log)
	if err := authorize(foreign.ID("/lb"), nil); err != nil {
		t.Errorf("a member of --lb-trust-domain is refused: %v", err)
	}
	if err := authorize(ca.ID("/ns/default/sa/lb"), nil); err == nil {
		t.Error("--lb-trust-domain is ignored: a member of the own trust domain is authorized")
	}
	// Each flag authorizes exactly the identities that it names.
	id, domain := ca.ID("/lb"), foreign.ID("/lb").TrustDomain()
	members := map[string]spiffeid.ID{"named": id, "other": ca.ID("/other"), "foreign": foreign.ID("/lb")}
	for _, tt := range []struct {
		name    string
		ids     []spiffeid.ID
		domain  spiffeid.TrustDomain
		allowed string
	}{
		{"nothing", nil, spiffeid.TrustDomain{}, "named other"},
		{"ID", []spiffeid.ID{id}, spiffeid.TrustDomain{}, "named"},
		{"trust domain", nil, domain, "foreign"},
		{"both", []spiffeid.ID{id}, domain, "foreign named"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := &runCommand{}
			c.LBID, c.LBTrustDomain = tt.ids, tt.domain
			authorize := c.authorizeLB(own, log)
			var allowed []string
			for name, peer := range members {
				if authorize(peer, nil) == nil {
					allowed = append(allowed, name)
				}
			}
			slices.Sort(allowed)
			if got := strings.Join(allowed, " "); got != tt.allowed {
				t.Errorf("authorized: %q, want %q", got, tt.allowed)
			}
		})
	}
	// Before the first SVID the trust domain is unknown.
	waiting, err := identity.NewFiles(t.TempDir(), identity.Options{})
	harness.Must(t, err)
	if err := identity.AuthorizeOwnDomain(waiting)(ca.ID("/lb"), nil); err == nil {
		t.Error("a peer is authorized without an own SVID")
	}
}
