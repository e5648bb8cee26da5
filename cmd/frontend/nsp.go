package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffetls/tlsconfig"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/pkg/files"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/nsp"
	"github.com/vipgate/vipgate/pkg/secret"
)

// nspFlags are the flags of the NSP, which replaces the trench file.
type nspFlags struct {
	ConfigSource     string        `help:"Source of VIPs and gateways: file (--trench-file), nsp (--nsp-service), or auto: the NSP if --nsp-service is given and the trench file does not exist." enum:"auto,file,nsp" default:"auto" group:"NSP"`
	NSPService       string        `name:"nsp-service" help:"Host and port of Meridio's NSP." placeholder:"HOST:PORT" group:"NSP"`
	TrenchName       string        `help:"Name of the trench at the NSP." placeholder:"NAME" group:"NSP"`
	AttractorName    string        `help:"Name of the attractor at the NSP." placeholder:"NAME" group:"NSP"`
	Namespace        string        `help:"Namespace of the Secrets with the passwords of the NSP's gateways." default:"default" group:"NSP"`
	NSPEntryTimeout  time.Duration `name:"nsp-entry-timeout" help:"How often the registration at the NSP is refreshed, which removes it after 60s." default:"30s" group:"NSP"`
	NSPKeepaliveTime time.Duration `name:"nsp-keepalive-time" help:"How long the connection to the NSP is silent before it is probed; less than 10s means 10s." default:"30s" group:"NSP"`
}

// cacheName is the file in --bird-dir that keeps the last configuration of the NSP.
const cacheName = "nsp.json"

// useNSP reports whether the NSP is the source of the configuration.
func (c *runFlags) useNSP() bool {
	if c.ConfigSource != "auto" {
		return c.ConfigSource == "nsp"
	}
	_, err := files.Do(context.Background(), &files.Calls{}, "trench file "+c.TrenchFile,
		func() (fs.FileInfo, error) { return os.Stat(c.TrenchFile) })
	return c.NSPService != "" && errors.Is(err, fs.ErrNotExist)
}

// checkNSP refuses flags of the NSP that would fail after the start.
func (c *runFlags) checkNSP(r *cli.Refusals) {
	host, port, err := net.SplitHostPort(c.NSPService)
	if n, errPort := strconv.ParseUint(port, 10, 16); c.NSPService == "" || err != nil || host == "" ||
		errPort != nil || n == 0 {
		r.Add(fmt.Errorf("--nsp-service=%s: write host and port of the NSP, such as nsp-service-trench-a:7778",
			c.NSPService))
	}
	const remedy = "write 1 to 60 characters out of A-Z a-z 0-9 _ . -"
	r.If(!nsp.ValidName(c.TrenchName), "--trench-name=%s: %s", c.TrenchName, remedy)
	r.If(!nsp.ValidName(c.AttractorName), "--attractor-name=%s: %s", c.AttractorName, remedy)
	r.Add(secret.CheckNamespace(c.Namespace))
	r.Within("--nsp-entry-timeout", c.NSPEntryTimeout, time.Second, time.Minute)
	r.Within("--nsp-keepalive-time", c.NSPKeepaliveTime, 0, 24*time.Hour)
}

// secrets returns the watcher of the passwords of the NSP's gateways.
func (c *runFlags) secrets(log *slog.Logger) *secret.Watcher {
	return secret.New(secret.Options{
		Dir: c.BirdDir, Namespace: c.Namespace, Log: log,
		Host: os.Getenv("KUBERNETES_SERVICE_HOST"), Port: os.Getenv("KUBERNETES_SERVICE_PORT"),
	})
}

// nspOptions returns the options of the client of the NSP.
func (c *runFlags) nspOptions(own *identity.Source, log *slog.Logger) (*nsp.Options, error) {
	host, err := os.Hostname()
	if err != nil {
		return nil, fmt.Errorf("failed to read the host name, by which the load balancer finds the frontend: %w", err)
	}
	return &nsp.Options{
		Target: c.NSPService, Trench: c.TrenchName, Attractor: c.AttractorName, Defaults: c.defaults(),
		Credentials: identity.NewCredentials(own, identity.CredentialOptions{
			Authorize: identity.AuthorizeOwnDomain(own), Log: log,
		}),
		Cache: filepath.Join(c.BirdDir, cacheName), Host: host,
		EntryTimeout: c.NSPEntryTimeout, KeepaliveTime: c.NSPKeepaliveTime, MaxBackoff: c.MaxBackoff, Log: log,
	}, nil
}

// authorizeLB returns the authorizer of the load balancer. In a Meridio pod no flag names its
// SPIFFE ID; the load balancer then has the ID of the frontend or another ID of the trench.
func (c *runFlags) authorizeLB(own *identity.Source, useNSP bool, log *slog.Logger) tlsconfig.Authorizer {
	if c.namesLB() || !useNSP {
		return identity.AuthorizeMember(c.LBTrustDomain, c.LBID...)
	}
	log.Warn("every member of the own trust domain is authorized as the load balancer, as in Meridio: "+
		"restrict it with --lb-id", "nsp", c.NSPService)
	return identity.AuthorizeOwnDomain(own)
}

// namesLB reports whether the flags authorize a load balancer.
func (c *runFlags) namesLB() bool { return len(c.LBID) > 0 || !c.LBTrustDomain.IsZero() }
