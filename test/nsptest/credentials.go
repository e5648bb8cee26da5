package nsptest

import (
	"github.com/spiffe/go-spiffe/v2/bundle/x509bundle"
	"github.com/spiffe/go-spiffe/v2/spiffetls/tlsconfig"
	"github.com/spiffe/go-spiffe/v2/svid/x509svid"
	"google.golang.org/grpc/credentials"
)

// ServerCredentials returns the credentials of Meridio's servers: mTLS that authorizes every
// SVID of the trust domain.
func ServerCredentials(svid x509svid.Source, bundle x509bundle.Source) credentials.TransportCredentials {
	return credentials.NewTLS(tlsconfig.MTLSServerConfig(svid, bundle, tlsconfig.AuthorizeAny()))
}

// ClientCredentials returns the credentials of Meridio's clients: mTLS that authorizes every
// SVID of the trust domain.
func ClientCredentials(svid x509svid.Source, bundle x509bundle.Source) credentials.TransportCredentials {
	return credentials.NewTLS(tlsconfig.MTLSClientConfig(svid, bundle, tlsconfig.AuthorizeAny()))
}
