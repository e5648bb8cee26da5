package main

import (
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/pkg/identity"
)

// svidCommand signs an SVID for a person, like `spire-server x509 mint`.
type svidCommand struct {
	ID              spiffeid.ID   `name:"id" required:"" help:"SPIFFE ID of the SVID, such as one that --reader-id of the running lb names." placeholder:"ID" env:"-"`
	SvidDir         string        `required:"" help:"Directory for tls.crt, tls.key and ca.crt; created if it is missing." type:"path" placeholder:"DIR" env:"-"`
	TTL             time.Duration `name:"dev-ttl" help:"Lifetime of the SVID." default:"24h" env:"-"`
	Identity        string        `help:"Must be dev: only the development authority can sign here." placeholder:"dev"`
	DevAuthorityDir string        `help:"Directory of the development authority, that of the running lb." type:"path" placeholder:"DIR"`
}

// maxSVIDTTL is the maximum lifetime: an SVID cannot be revoked.
const maxSVIDTTL = 30 * 24 * time.Hour

func (c *svidCommand) Run(out *cli.Output) error {
	// Check every flag before signing: an SVID cannot be revoked.
	switch {
	case c.Identity == "":
		return cli.Usage("which authority should sign? Only the development authority can: add --identity=dev")
	case c.Identity != "dev":
		return cli.Usage("--identity=%s: only the development authority (--identity=dev) signs here; have the SVID signed "+
			"where yours come from, such as `spire-server x509 mint`", c.Identity)
	case c.DevAuthorityDir == "":
		return cli.Usage("--dev-authority-dir is missing: name the directory that the running lb has")
	case c.ID.Path() == "":
		return cli.Usage("--id=%s names no workload: it needs a path, such as spiffe://vipgate.local/operator", c.ID)
	case c.TTL < time.Second || c.TTL > maxSVIDTTL:
		return cli.Usage("--dev-ttl=%v: an SVID lives for 1s to %v", c.TTL, maxSVIDTTL)
	}
	authority, err := identity.LoadDevAuthority(c.DevAuthorityDir)
	if err != nil {
		return err
	}
	svid, err := authority.MintFor(c.ID, c.TTL)
	if err == nil {
		err = authority.WriteFiles(c.SvidDir, svid)
	}
	if err != nil {
		return err
	}
	out.Printf("%s/tls.crt, tls.key, ca.crt: %s until %s\n", c.SvidDir, svid.ID,
		svid.Certificates[0].NotAfter.UTC().Format(time.RFC3339))
	return nil
}
