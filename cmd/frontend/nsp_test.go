package main

import (
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"

	"github.com/vipgate/vipgate/pkg/identity"
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

func TestSourceOfConfiguration(t *testing.T) {
	absent := filepath.Join(t.TempDir(), "trench.yaml")
	tests := []struct {
		name, line string
		variables  bool
		nsp        bool
	}{
		{"a trench file", "--lb-id=spiffe://example.org/lb --identity=spiffe", false, false},
		{"both", "--lb-id=spiffe://example.org/lb", true, false},
		{"the NSP", "--trench-file=" + absent, true, true},
		{"both, the NSP by flag", "--config-source=nsp", true, true},
		{"without gating", "--trench-file=" + absent + " --gating=off", true, true},
		{"readiness files", "--trench-file=" + absent + " --readiness-dir=/var/run/meridio", true, true},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			variables := map[string]string{"SPIFFE_ENDPOINT_SOCKET": "unix:///run/spire/sockets/agent.sock"}
			if test.variables {
				variables = nspVariables(t)
			}
			o, err := readinessOptions(t, variables, strings.Fields(test.line)...)
			if err != nil {
				t.Fatal(err)
			}
			if (o.NSP != nil) != test.nsp || o.Identity == nil {
				t.Fatalf("the NSP is %v, identity %v", o.NSP, o.Identity)
			}
			if !test.nsp {
				return
			}
			host, err := os.Hostname()
			if err != nil {
				t.Fatal(err)
			}
			n := o.NSP
			if n.Target != "nsp-service-trench-a.default:7778" || n.Trench != "trench-a" ||
				n.Attractor != "attractor-a-1" || n.Cache != filepath.Join(variables["VIPGATE_BIRD_DIR"], "nsp.json") ||
				n.Host != host || n.MaxBackoff != 5*time.Second || n.EntryTimeout != 30*time.Second || n.Credentials == nil {
				t.Errorf("the options are %+v", n)
			}
		})
	}
}

func TestNSPFlagsThatCannotWork(t *testing.T) {
	for line, want := range map[string]string{
		"--config-source=nsp --nsp-service=nsp":                 "--nsp-service=nsp: write host and port",
		"--config-source=nsp --nsp-service=nsp:0":               "--nsp-service=nsp:0: write host and port",
		"--config-source=nsp --nsp-service=:7778":               "--nsp-service=:7778: write host and port",
		"--config-source=nsp --trench-name=a/b":                 "--trench-name=a/b: write 1 to 60",
		"--config-source=nsp --attractor-name=":                 "--attractor-name=: write 1 to 60",
		"--config-source=nsp --nsp-entry-timeout=2m":            "--nsp-entry-timeout=2m0s: at most 1m0s",
		"--config-source=file --lb-socket=unix:///run/lb.sock":  "--lb-id is required",
		"--config-source=nsp --local-as=0":                      "--local-as",
		"--config-source=nsp --identity=files --svid-dir=/none": "--svid-dir=/none",
	} {
		t.Run(line, func(t *testing.T) {
			_, err := readinessOptions(t, nspVariables(t), strings.Fields(line)...)
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("error %v, want one that says %q", err, want)
			}
		})
	}
}

// With the NSP and without a flag, any member of the frontend's trust domain can be the load
// balancer. A flag restricts it to the named identities.
func TestAuthorizationWithNSP(t *testing.T) {
	ca, foreign := identitytest.NewCA(t, "example.org"), identitytest.NewCA(t, "example.com")
	own := ca.Source(ca.SVID(ca.ID("/ns/default/sa/frontend"), time.Hour))
	log := slog.New(slog.DiscardHandler)
	c := &runFlags{}
	member := c.authorizeLB(own, true, log)
	if err := member(ca.ID("/ns/default/sa/lb"), nil); err != nil {
		t.Error(err)
	}
	if err := member(foreign.ID("/lb"), nil); err == nil || !strings.Contains(err.Error(), "trust domain example.org") {
		t.Errorf("error %v, want that a member of example.org is expected", err)
	}
	c.LBID = append(c.LBID, ca.ID("/lb"))
	if err := c.authorizeLB(own, true, log)(ca.ID("/other"), nil); err == nil {
		t.Error("--lb-id is ignored")
	}
	// A trust domain from a flag replaces the frontend's trust domain.
	named := &runFlags{}
	named.LBTrustDomain = foreign.ID("/lb").TrustDomain()
	authorize := named.authorizeLB(own, true, log)
	if err := authorize(foreign.ID("/lb"), nil); err != nil {
		t.Errorf("a member of --lb-trust-domain is refused: %v", err)
	}
	if err := authorize(ca.ID("/ns/default/sa/lb"), nil); err == nil {
		t.Error("--lb-trust-domain is ignored: a member of the own trust domain is authorized")
	}
	if err := (&runFlags{}).authorizeLB(own, false, log)(ca.ID("/lb"), nil); err == nil {
		t.Error("with a trench file and without --lb-id, a member is authorized")
	}
	// Each flag authorizes exactly the identities that it names.
	id, domain := ca.ID("/lb"), foreign.ID("/lb").TrustDomain()
	members := map[string]spiffeid.ID{"named": id, "other": ca.ID("/other"), "foreign": foreign.ID("/lb")}
	for _, tt := range []struct {
		name    string
		ids     []spiffeid.ID
		domain  spiffeid.TrustDomain
		nsp     bool
		allowed string
	}{
		{"nothing, trench file", nil, spiffeid.TrustDomain{}, false, ""},
		{"nothing, NSP", nil, spiffeid.TrustDomain{}, true, "named other"},
		{"ID, trench file", []spiffeid.ID{id}, spiffeid.TrustDomain{}, false, "named"},
		{"ID, NSP", []spiffeid.ID{id}, spiffeid.TrustDomain{}, true, "named"},
		{"trust domain, trench file", nil, domain, false, "foreign"},
		{"trust domain, NSP", nil, domain, true, "foreign"},
		{"both, trench file", []spiffeid.ID{id}, domain, false, "foreign named"},
		{"both, NSP", []spiffeid.ID{id}, domain, true, "foreign named"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := &runFlags{}
			c.LBID, c.LBTrustDomain = tt.ids, tt.domain
			authorize := c.authorizeLB(own, tt.nsp, log)
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
	if err != nil {
		t.Fatal(err)
	}
	if err := identity.AuthorizeOwnDomain(waiting)(ca.ID("/lb"), nil); err == nil {
		t.Error("a peer is authorized without an own SVID")
	}
}
