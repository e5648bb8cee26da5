package identity

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/spiffetls/tlsconfig"
	"github.com/spiffe/go-spiffe/v2/svid/x509svid"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
)

// CredentialOptions configure credentials.
type CredentialOptions struct {
	// Authorize authorizes the SPIFFE ID of the peer at each handshake; see [Authorize]. Nil
	// rejects every peer.
	Authorize tlsconfig.Authorizer
	// HandshakeTimeout bounds the handshake and the first bytes of HTTP/2 on a server. Zero: 5 s.
	// Clients are bounded by their context.
	HandshakeTimeout time.Duration
	// Log receives the rejections of a server, rate-limited per peer and reason, and the ends of
	// connections; nil discards them. A client returns its rejections as errors.
	Log *slog.Logger
}

// Authorize authorizes exactly the given SPIFFE IDs. Its error names them and the peer's.
func Authorize(ids ...spiffeid.ID) tlsconfig.Authorizer {
	ids = slices.Clone(ids)
	return func(got spiffeid.ID, _ [][]*x509.Certificate) error {
		switch {
		case slices.Contains(ids, got):
			return nil
		case len(ids) == 1:
			return fmt.Errorf("the peer is %s, expected %s", got, ids[0])
		}
		return fmt.Errorf("the peer is %s, expected one of %s", got, join(ids))
	}
}

// AuthorizeMember authorizes every member of the trust domain, and the given SPIFFE IDs of any
// trust domain.
func AuthorizeMember(td spiffeid.TrustDomain, ids ...spiffeid.ID) tlsconfig.Authorizer {
	ids = slices.Clone(ids)
	return func(got spiffeid.ID, _ [][]*x509.Certificate) error {
		switch {
		case got.MemberOf(td), slices.Contains(ids, got):
			return nil
		case len(ids) == 0:
			return fmt.Errorf("the peer is %s, expected a member of trust domain %s", got, td)
		}
		return fmt.Errorf("the peer is %s, expected a member of trust domain %s or one of %s", got, td, join(ids))
	}
}

// AuthInfo is the result of a handshake.
type AuthInfo struct {
	credentials.TLSInfo
	// ID is the SPIFFE ID of the peer.
	ID spiffeid.ID
	// End is when the connection ends: the earlier NotAfter of the two leaf certificates.
	End time.Time
}

// PeerID returns the SPIFFE ID of the peer of a call on a connection with credentials of this
// package.
func PeerID(ctx context.Context) (spiffeid.ID, bool) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return spiffeid.ID{}, false
	}
	info, ok := p.AuthInfo.(AuthInfo)
	return info.ID, ok
}

// ConnectionEnd returns when a connection is closed: the earlier NotAfter of the two leaf
// certificates.
func ConnectionEnd(info credentials.AuthInfo) (time.Time, bool) {
	i, ok := info.(AuthInfo)
	return i.End, ok
}

// ServerCredentials are the credentials of a server that accepts the peers of o.Authorize. A
// rejection is logged with the peer's ID and the reason.
func ServerCredentials(src *Source, o CredentialOptions) credentials.TransportCredentials {
	return newMutual(src, o)
}

// ClientCredentials are the credentials of a client that accepts the servers of o.Authorize. The
// error of a failed handshake is a [HandshakeError]. A rejection by the server appears at the first
// read, as far as TLS 1.3 shows it.
func ClientCredentials(src *Source, o CredentialOptions) credentials.TransportCredentials {
	return newMutual(src, o)
}

type mutual struct {
	src       *Source
	authorize tlsconfig.Authorizer
	timeout   time.Duration
	log       *slog.Logger
	denials   *denialLog
}

func newMutual(src *Source, o CredentialOptions) *mutual {
	if o.Authorize == nil {
		o.Authorize = func(got spiffeid.ID, _ [][]*x509.Certificate) error {
			return fmt.Errorf("the peer is %s, but no SPIFFE ID is authorized", got)
		}
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	log := o.Log.With("component", "identity")
	return &mutual{
		src:       src,
		authorize: o.Authorize,
		timeout:   cmp.Or(o.HandshakeTimeout, 5*time.Second),
		log:       log,
		denials:   newDenialLog(log),
	}
}

// handshake is the state of one handshake.
type handshake struct {
	*mutual
	svid      *x509svid.SVID
	peer      spiffeid.ID
	rejection *HandshakeError
}

// newHandshake gets the SVID for the whole handshake. Without one it fails before the peer is
// verified, so that the reason is reported.
func (m *mutual) newHandshake() (*handshake, *HandshakeError) {
	own, err := m.src.GetX509SVID()
	if err != nil {
		return nil, &HandshakeError{Reason: ReasonNoOwnSVID, Err: err}
	}
	return &handshake{mutual: m, svid: own}, nil
}

// tlsConfig returns a new configuration per handshake. Sessions are never resumed: a resumed
// session skips VerifyPeerCertificate, where go-spiffe checks the ID (measured with go-spiffe
// 2.9.0), and would outlive the certificates of its handshake.
func (h *handshake) tlsConfig() *tls.Config {
	cert := &tls.Certificate{PrivateKey: h.svid.PrivateKey, Leaf: h.svid.Certificates[0]}
	for _, c := range h.svid.Certificates {
		cert.Certificate = append(cert.Certificate, c.Raw)
	}
	return &tls.Config{
		MinVersion:             tls.VersionTLS13,
		SessionTicketsDisabled: true,
		GetCertificate:         func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return cert, nil },
		GetClientCertificate:   func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return cert, nil },
		ClientAuth:             tls.RequireAnyClientCert,
		// Host names have no meaning here. verify does the whole verification on both sides, also
		// for a resumed session.
		InsecureSkipVerify: true,
		VerifyConnection:   h.verify,
	}
}

// verify verifies the peer. It runs before the peer has proved possession of the key, so its result
// is valid only after a successful handshake.
func (h *handshake) verify(cs tls.ConnectionState) error {
	if err := h.verifyChain(cs.PeerCertificates); err != nil {
		h.rejection = err
		return err
	}
	return nil
}

func (h *handshake) verifyChain(certs []*x509.Certificate) *HandshakeError {
	if len(certs) == 0 {
		return &HandshakeError{Reason: ReasonNoCertificate, Err: errors.New("the peer sent no certificate")}
	}
	id, err := x509svid.IDFromCert(certs[0])
	if err != nil {
		return &HandshakeError{Reason: ReasonBadSVID, Err: err}
	}
	h.peer = id
	if _, err := h.src.GetX509BundleForTrustDomain(id.TrustDomain()); err != nil {
		err = fmt.Errorf("no bundle for trust domain %s: %w", id.TrustDomain(), err)
		// The error names the expected IDs, too.
		if unexpected := h.authorize(id, nil); unexpected != nil {
			err = fmt.Errorf("%w; %w", unexpected, err)
		}
		return &HandshakeError{Reason: ReasonTrustDomain, PeerID: id, Err: err}
	}
	now := time.Now()
	_, chains, err := x509svid.Verify(certs, h.src, x509svid.WithTime(now))
	if err != nil {
		reason, err := classifyChain(id, err, now)
		return &HandshakeError{Reason: reason, PeerID: id, Err: err}
	}
	if err := h.authorize(id, chains); err != nil {
		return &HandshakeError{Reason: ReasonWrongID, PeerID: id, Err: err}
	}
	return nil
}

// handshakeError returns the HandshakeError for the error of a handshake.
func (h *handshake) handshakeError(err error) *HandshakeError {
	if h.rejection != nil {
		return h.rejection
	}
	return &HandshakeError{Reason: classify(err), PeerID: h.peer, Err: err}
}

// finish limits the lifetime of a connection to that of its certificates.
func (h *handshake) finish(c net.Conn, raw net.Conn, info credentials.AuthInfo) (*mutualConn, AuthInfo, error) {
	tlsInfo, ok := info.(credentials.TLSInfo)
	if !ok || len(tlsInfo.State.PeerCertificates) == 0 {
		// Only if crypto/tls violated the configuration.
		return nil, AuthInfo{}, errors.New("the handshake was not mutual")
	}
	peerCert := tlsInfo.State.PeerCertificates[0]
	end, owner := h.svid.Certificates[0].NotAfter, "own"
	if peerCert.NotAfter.Before(end) {
		end, owner = peerCert.NotAfter, "peer"
	}
	conn := &mutualConn{Conn: c}
	// The timer is monotonic: later jumps of the wall clock have no effect.
	conn.timer = time.AfterFunc(time.Until(end), func() {
		h.log.Info("connection closed: SVID expired", "peer_id", h.peer.String(), "svid", owner, "not_after", end)
		// The raw connection: the TLS layer would first send close_notify, for up to 5 s when the
		// peer does not read.
		_ = raw.Close()
	})
	return conn, AuthInfo{TLSInfo: tlsInfo, ID: h.peer, End: end}, nil
}

// ServerHandshake implements [credentials.TransportCredentials].
func (m *mutual) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	attrs := peerAttrs(raw) // read now, since a failed handshake closes the connection
	// Remains set for the first bytes of HTTP/2; gRPC then clears it.
	if err := raw.SetDeadline(time.Now().Add(m.timeout)); err != nil {
		return nil, nil, errors.Join(fmt.Errorf("deadline of the handshake: %w", err), raw.Close())
	}
	h, failure := m.newHandshake()
	if failure != nil {
		m.logDenial(failure, attrs)
		return nil, nil, errors.Join(failure, raw.Close())
	}
	c, info, err := credentials.NewTLS(h.tlsConfig()).ServerHandshake(raw)
	if err != nil {
		failure := h.handshakeError(err)
		m.logDenial(failure, attrs)
		return nil, nil, errors.Join(failure, ignoreClosed(raw.Close()))
	}
	conn, authInfo, err := h.finish(c, raw, info)
	if err != nil {
		return nil, nil, errors.Join(err, c.Close())
	}
	// A limited listener (endpoint.Limit) closes unauthenticated connections first.
	if limited, ok := raw.(interface{ Authenticated() }); ok {
		limited.Authenticated()
	}
	return conn, authInfo, nil
}

// logDenial logs a rejection: the client sees only the end of the connection.
func (m *mutual) logDenial(failure *HandshakeError, peer []any) {
	if failure.Reason == ReasonGone {
		// A probe of the socket, such as that of [Listen].
		m.log.Debug("client closed the connection during the TLS handshake", "error", failure.Err)
		return
	}
	attrs := append([]any{"reason", string(failure.Reason), "peer_id", failure.PeerID.String(), "error", failure.Err},
		peer...)
	m.denials.log(failure.PeerID.String()+" "+string(failure.Reason), "client refused", attrs...)
}

// ClientHandshake implements [credentials.TransportCredentials].
func (m *mutual) ClientHandshake(ctx context.Context, authority string, raw net.Conn) (net.Conn, credentials.AuthInfo,
	error,
) {
	h, failure := m.newHandshake()
	if failure != nil {
		return nil, nil, errors.Join(failure, raw.Close())
	}
	c, info, err := credentials.NewTLS(h.tlsConfig()).ClientHandshake(ctx, authority, raw)
	switch {
	case err != nil && err == ctx.Err():
		// The abandoned handshake may still be running and use h.
		return nil, nil, &HandshakeError{Reason: classify(err), Err: err}
	case err != nil:
		return nil, nil, h.handshakeError(err)
	}
	conn, authInfo, err := h.finish(c, raw, info)
	if err != nil {
		return nil, nil, errors.Join(err, c.Close())
	}
	conn.ownID = h.svid.ID
	return conn, authInfo, nil
}

// Info implements [credentials.TransportCredentials].
func (m *mutual) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "tls"}
}

// Clone implements [credentials.TransportCredentials]. The credentials are immutable.
func (m *mutual) Clone() credentials.TransportCredentials { return m }

// OverrideServerName implements [credentials.TransportCredentials].
func (m *mutual) OverrideServerName(string) error {
	return errors.New("peers are authenticated by SPIFFE ID, not by server name")
}

func ignoreClosed(err error) error {
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}
