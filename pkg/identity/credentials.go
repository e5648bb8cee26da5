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

// CredentialOptions tell whom to let in.
type CredentialOptions struct {
	// Authorize decides on the SPIFFE ID of the peer, at each handshake; see
	// [Authorize]. Nil refuses everybody.
	Authorize tlsconfig.Authorizer
	// HandshakeTimeout is how long a server gives a client for the handshake and
	// the first bytes of HTTP/2. Zero: 5 s. Clients are bounded by their context.
	HandshakeTimeout time.Duration
	// Log receives the refusals of a server, rate-limited per peer and reason, and
	// the ends of connections; nil: nothing is logged. What a client refuses is
	// returned.
	Log *slog.Logger
}

// Authorize allows exactly the given SPIFFE IDs. Its error names them, and the one
// that came.
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

// AuthorizeMember allows every member of the trust domain, and the given SPIFFE
// IDs of whatever trust domain.
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

// AuthInfo is what a handshake found out about the peer.
type AuthInfo struct {
	credentials.TLSInfo
	// ID is the SPIFFE ID of the peer.
	ID spiffeid.ID
	// End is when the connection ends: the earlier NotAfter of the two leaf
	// certificates.
	End time.Time
}

// PeerID returns the SPIFFE ID of the peer of a call, if the connection was made
// with credentials of this package.
func PeerID(ctx context.Context) (spiffeid.ID, bool) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return spiffeid.ID{}, false
	}
	info, ok := p.AuthInfo.(AuthInfo)
	return info.ID, ok
}

// ConnectionEnd returns when a connection ends for good: the earlier NotAfter of
// the two leaf certificates.
func ConnectionEnd(info credentials.AuthInfo) (time.Time, bool) {
	i, ok := info.(AuthInfo)
	return i.End, ok
}

// ServerCredentials are the credentials of a server that lets in whom o.Authorize
// allows. A refusal is logged with the peer's ID and the reason.
func ServerCredentials(src *Source, o CredentialOptions) credentials.TransportCredentials {
	return newMutual(src, o)
}

// ClientCredentials are the credentials of a client that talks to whom o.Authorize
// allows. The error of a handshake that fails is a [HandshakeError]; when the
// server is the one who refuses, the first read says so, as far as TLS 1.3 tells.
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
			return fmt.Errorf("the peer is %s, and nobody is allowed", got)
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

// handshake is one handshake: what we show and what we think of the peer.
type handshake struct {
	*mutual
	own    *x509svid.SVID
	peer   spiffeid.ID
	denied *HandshakeError
}

// begin takes our SVID, the same for the whole handshake. Without one there is no
// point in looking at the peer: the reason would be lost among the consequences.
func (m *mutual) begin() (*handshake, *HandshakeError) {
	own, err := m.src.GetX509SVID()
	if err != nil {
		return nil, &HandshakeError{Reason: ReasonNoOwnSVID, Err: err}
	}
	return &handshake{mutual: m, own: own}, nil
}

// config is made anew for each handshake. Sessions are never resumed: a resumed
// one skips VerifyPeerCertificate, where go-spiffe checks the ID (measured in
// go-spiffe 2.9.0), and would outlive the certificates it began with.
func (h *handshake) config() *tls.Config {
	shown := &tls.Certificate{PrivateKey: h.own.PrivateKey, Leaf: h.own.Certificates[0]}
	for _, c := range h.own.Certificates {
		shown.Certificate = append(shown.Certificate, c.Raw)
	}
	return &tls.Config{
		MinVersion:             tls.VersionTLS13,
		SessionTicketsDisabled: true,
		GetCertificate:         func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return shown, nil },
		GetClientCertificate:   func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return shown, nil },
		ClientAuth:             tls.RequireAnyClientCert,
		// Names of hosts mean nothing here; verify does the whole check, on both
		// sides, and would do so for a resumed session as well.
		InsecureSkipVerify: true,
		VerifyConnection:   h.verify,
	}
}

// verify decides on the peer. It runs before the peer has proved that it has the
// key, so that what it sets counts only after a handshake that succeeded.
func (h *handshake) verify(cs tls.ConnectionState) error {
	if err := h.verifyChain(cs.PeerCertificates); err != nil {
		h.denied = err
		return err
	}
	return nil
}

func (h *handshake) verifyChain(certs []*x509.Certificate) *HandshakeError {
	if len(certs) == 0 {
		return &HandshakeError{Reason: ReasonNoCertificate, Err: errors.New("the peer showed no certificate")}
	}
	id, err := x509svid.IDFromCert(certs[0])
	if err != nil {
		return &HandshakeError{Reason: ReasonBadSVID, Err: err}
	}
	h.peer = id
	if _, err := h.src.GetX509BundleForTrustDomain(id.TrustDomain()); err != nil {
		err = fmt.Errorf("no bundle for trust domain %s: %w", id.TrustDomain(), err)
		// Whoever reads it wants to know as well whom we expect.
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

// failure makes a HandshakeError of whatever ended the handshake.
func (h *handshake) failure(err error) *HandshakeError {
	if h.denied != nil {
		return h.denied
	}
	return &HandshakeError{Reason: classify(err), PeerID: h.peer, Err: err}
}

// finish bounds the life of a connection whose handshake succeeded.
func (h *handshake) finish(c net.Conn, raw net.Conn, info credentials.AuthInfo) (*mutualConn, AuthInfo, error) {
	tlsInfo, ok := info.(credentials.TLSInfo)
	if !ok || len(tlsInfo.State.PeerCertificates) == 0 {
		// Only if crypto/tls did not do as the configuration says.
		return nil, AuthInfo{}, errors.New("the handshake was not mutual")
	}
	theirs := tlsInfo.State.PeerCertificates[0]
	end, whose := h.own.Certificates[0].NotAfter, "ours"
	if theirs.NotAfter.Before(end) {
		end, whose = theirs.NotAfter, "the peer's"
	}
	conn := &mutualConn{Conn: c}
	// The timer is monotonic: a clock that jumps later changes nothing.
	conn.timer = time.AfterFunc(time.Until(end), func() {
		h.log.Info("connection ended with the SVID", "peer_id", h.peer.String(), "svid", whose, "not_after", end)
		// The raw connection: the TLS layer would first try to say goodbye, for
		// up to 5 s when the peer does not read.
		_ = raw.Close()
	})
	return conn, AuthInfo{TLSInfo: tlsInfo, ID: h.peer, End: end}, nil
}

// ServerHandshake implements [credentials.TransportCredentials].
func (m *mutual) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	who := peerAttrs(raw) // asked now, since a failed handshake closes the connection
	// Stays in force for the first bytes of HTTP/2; gRPC clears it after them.
	if err := raw.SetDeadline(time.Now().Add(m.timeout)); err != nil {
		return nil, nil, errors.Join(fmt.Errorf("deadline of the handshake: %w", err), raw.Close())
	}
	h, failure := m.begin()
	if failure != nil {
		m.logDenial(failure, who)
		return nil, nil, errors.Join(failure, raw.Close())
	}
	c, info, err := credentials.NewTLS(h.config()).ServerHandshake(raw)
	if err != nil {
		failure := h.failure(err)
		m.logDenial(failure, who)
		return nil, nil, errors.Join(failure, ignoreClosed(raw.Close()))
	}
	conn, authInfo, err := h.finish(c, raw, info)
	if err != nil {
		return nil, nil, errors.Join(err, c.Close())
	}
	// A limited listener (endpoint.Limit) closes other connections first.
	if limited, ok := raw.(interface{ Authenticated() }); ok {
		limited.Authenticated()
	}
	return conn, authInfo, nil
}

// logDenial tells of a refusal: the client hears of it only that the connection
// ended.
func (m *mutual) logDenial(failure *HandshakeError, who []any) {
	if failure.Reason == ReasonGone {
		// Someone who only looked whether we listen, such as [Listen] does.
		m.log.Debug("client left during the TLS handshake", "error", failure.Err)
		return
	}
	attrs := append([]any{"reason", string(failure.Reason), "peer_id", failure.PeerID.String(), "error", failure.Err}, who...)
	m.denials.log(failure.PeerID.String()+" "+string(failure.Reason), "client refused", attrs...)
}

// ClientHandshake implements [credentials.TransportCredentials].
func (m *mutual) ClientHandshake(ctx context.Context, authority string, raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	h, failure := m.begin()
	if failure != nil {
		return nil, nil, errors.Join(failure, raw.Close())
	}
	c, info, err := credentials.NewTLS(h.config()).ClientHandshake(ctx, authority, raw)
	switch {
	case err != nil && err == ctx.Err():
		// The handshake was abandoned and may still be running: hands off h.
		return nil, nil, &HandshakeError{Reason: classify(err), Err: err}
	case err != nil:
		return nil, nil, h.failure(err)
	}
	conn, authInfo, err := h.finish(c, raw, info)
	if err != nil {
		return nil, nil, errors.Join(err, c.Close())
	}
	conn.shown = h.own.ID
	return conn, authInfo, nil
}

// Info implements [credentials.TransportCredentials].
func (m *mutual) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "tls"}
}

// Clone implements [credentials.TransportCredentials]. There is nothing that a
// copy could change.
func (m *mutual) Clone() credentials.TransportCredentials { return m }

// OverrideServerName implements [credentials.TransportCredentials].
func (m *mutual) OverrideServerName(string) error {
	return errors.New("peers are known by SPIFFE ID, not by server name")
}

func ignoreClosed(err error) error {
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}
