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
	"strings"
	"sync/atomic"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/spiffetls/tlsconfig"
	"github.com/spiffe/go-spiffe/v2/svid/x509svid"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"

	"github.com/vipgate/vipgate/pkg/logs"
)

// handshakeTimeout bounds the handshake and the first bytes of HTTP/2 on a server. Clients are
// bounded by their context.
const handshakeTimeout = 5 * time.Second

// CredentialOptions configure credentials.
type CredentialOptions struct {
	// Authorize authorizes the peer's SPIFFE ID at each handshake; see [Authorize]. Nil rejects all.
	Authorize tlsconfig.Authorizer
	// Log receives the rejections of a server, rate-limited per peer and reason, and the ends of
	// connections; nil discards them. A client returns its rejections as errors.
	Log *slog.Logger
}

// Authorize authorizes exactly the given SPIFFE IDs. Its error names them and the peer's.
func Authorize(ids ...spiffeid.ID) tlsconfig.Authorizer {
	return AuthorizeMember(spiffeid.TrustDomain{}, ids...)
}

// AuthorizeMember authorizes every member of the trust domain, and the given IDs of any domain.
func AuthorizeMember(domain spiffeid.TrustDomain, ids ...spiffeid.ID) tlsconfig.Authorizer {
	var expected []string
	if !domain.IsZero() {
		expected = append(expected, "a member of trust domain "+domain.Name())
	}
	switch {
	case len(ids) == 0 && domain.IsZero():
		expected = append(expected, "none: no SPIFFE ID is authorized")
	case len(ids) == 1:
		expected = append(expected, ids[0].String())
	case len(ids) > 1:
		expected = append(expected, "one of "+join(ids))
	}
	// The caller may change its slice, which the authorizer reads in later handshakes.
	ids = slices.Clone(ids)
	return func(got spiffeid.ID, _ [][]*x509.Certificate) error {
		if slices.Contains(ids, got) || !domain.IsZero() && got.MemberOf(domain) {
			return nil
		}
		return fmt.Errorf("the peer is %s, expected %s", got, strings.Join(expected, " or "))
	}
}

// AuthorizeOwnDomain authorizes every member of the trust domain of the own SVID. The domain is
// known only at the handshake.
func AuthorizeOwnDomain(own *Source) tlsconfig.Authorizer {
	return func(got spiffeid.ID, chains [][]*x509.Certificate) error {
		svid, err := own.GetX509SVID()
		if err != nil {
			return err
		}
		return AuthorizeMember(svid.ID.TrustDomain())(got, chains)
	}
}

// AuthInfo is the result of a handshake.
type AuthInfo struct {
	credentials.AuthInfo
	// ID is the SPIFFE ID of the peer, or that of its user; see [UserID].
	ID spiffeid.ID
	// End is when the connection ends: the earlier NotAfter of the two leaf certificates. Zero without
	// certificates.
	End time.Time
}

// PeerID returns the SPIFFE ID of a call's peer on a connection with credentials of this package.
func PeerID(ctx context.Context) (spiffeid.ID, bool) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return spiffeid.ID{}, false
	}
	info, ok := p.AuthInfo.(AuthInfo)
	return info.ID, ok
}

// SocketInfo identifies the user of the process that connected to a unix socket without TLS.
type SocketInfo struct {
	credentials.AuthInfo
	UID uint32
}

// Caller names the caller of a call for logs and events: its SPIFFE ID, or the user of the process
// at the unix socket; "unknown" without credentials of this package.
func Caller(ctx context.Context) string {
	if id, ok := PeerID(ctx); ok {
		if uid, user := UserOf(id); user {
			return fmt.Sprintf("uid %d", uid)
		}
		return id.String()
	}
	if p, ok := peer.FromContext(ctx); ok {
		if info, ok := p.AuthInfo.(SocketInfo); ok {
			return fmt.Sprintf("uid %d", info.UID)
		}
	}
	return "unknown"
}

// ConnectionEnd returns when a connection is closed: the earlier NotAfter of the two leaf
// certificates. It reports whether the connection has certificates.
func ConnectionEnd(info credentials.AuthInfo) (time.Time, bool) {
	i, _ := info.(AuthInfo)
	return i.End, !i.End.IsZero()
}

type mutual struct {
	credentials.TransportCredentials // TLS, for methods other than handshakes
	src                              *Source
	authorize                        tlsconfig.Authorizer
	timeout                          time.Duration
	log                              *slog.Logger
	throttle                         logs.Throttle // of rejections
}

// NewCredentials returns credentials that accept the peers of Authorize. The error of a failed
// handshake is a [HandshakeError], which a server also logs with the peer's ID. A client sees a
// rejection by the server at the first read, as far as TLS 1.3 shows it.
//
// With a source of [NewPeerCredentials] they authenticate the peer by its user, without TLS.
func NewCredentials(src *Source, options CredentialOptions) credentials.TransportCredentials {
	if options.Authorize == nil {
		options.Authorize = Authorize()
	}
	options.Log = cmp.Or(options.Log, slog.New(slog.DiscardHandler))
	if src != nil && src.origin == (peerCredentials{}) {
		return &userCredentials{authorize: options.Authorize, log: options.Log.With("component", "identity")}
	}
	return &mutual{
		TransportCredentials: credentials.NewTLS(nil),

		src: src, authorize: options.Authorize, timeout: handshakeTimeout, log: options.Log.With("component", "identity"),
	}
}

type handshake struct {
	*mutual
	svid      *x509svid.SVID
	peer      spiffeid.ID
	rejection *HandshakeError
}

// newHandshake gets the SVID for the whole handshake. Without one it fails before the peer is
// verified, so that the reason is reported.
func (mutual *mutual) newHandshake() (*handshake, *HandshakeError) {
	own, err := mutual.src.GetX509SVID()
	if err != nil {
		return nil, &HandshakeError{Reason: ReasonNoOwnSVID, Err: err}
	}
	return &handshake{mutual: mutual, svid: own}, nil
}

// tlsConfig returns a new configuration per handshake. Sessions are never resumed: a resumed
// session skips VerifyPeerCertificate, where go-spiffe checks the ID (measured with go-spiffe
// 2.9.0), and would outlive the certificates of its handshake.
func (handshake *handshake) tlsConfig() *tls.Config {
	return &tls.Config{
		MinVersion:             tls.VersionTLS13,
		SessionTicketsDisabled: true,
		GetCertificate:         tlsconfig.GetCertificate(handshake.svid),
		GetClientCertificate:   tlsconfig.GetClientCertificate(handshake.svid),
		ClientAuth:             tls.RequireAnyClientCert,
		// Host names mean nothing here. verify verifies all, on both sides, also for a resumed session.
		InsecureSkipVerify: true,
		VerifyConnection:   handshake.verify,
	}
}

// verify verifies the peer. It runs before the peer has proved possession of the key, so its result
// is valid only after a successful handshake.
func (handshake *handshake) verify(state tls.ConnectionState) error {
	certs := state.PeerCertificates
	id, err := x509svid.IDFromCert(certs[0])
	if err != nil {
		return handshake.reject(ReasonBadSVID, err)
	}
	handshake.peer = id
	if _, err := handshake.src.GetX509BundleForTrustDomain(id.TrustDomain()); err != nil {
		err = fmt.Errorf("no bundle for trust domain %s: %w", id.TrustDomain(), err)
		// The error names the expected IDs, too.
		if unexpected := handshake.authorize(id, nil); unexpected != nil {
			err = fmt.Errorf("%w; %w", unexpected, err)
		}
		return handshake.reject(ReasonTrustDomain, err)
	}
	now := time.Now()
	_, chains, err := x509svid.Verify(certs, handshake.src, x509svid.WithTime(now))
	if err != nil {
		return handshake.reject(classifyChain(id, err, now))
	}
	if err := handshake.authorize(id, chains); err != nil {
		return handshake.reject(ReasonWrongID, err)
	}
	return nil
}

func (handshake *handshake) reject(reason Reason, err error) error {
	handshake.rejection = &HandshakeError{Reason: reason, PeerID: handshake.peer, Err: err}
	return handshake.rejection
}

// handshakeError returns the HandshakeError for the error of a handshake.
func (handshake *handshake) handshakeError(err error) *HandshakeError {
	if handshake.rejection != nil {
		return handshake.rejection
	}
	return &HandshakeError{Reason: classify(err), PeerID: handshake.peer, Err: err}
}

// finish closes the connection when the first of the two leaf certificates expires.
func (handshake *handshake) finish(conn, raw net.Conn, info credentials.AuthInfo) (*mutualConn, AuthInfo) {
	tlsInfo := info.(credentials.TLSInfo) // of credentials.NewTLS
	end, owner := handshake.svid.Certificates[0].NotAfter, "own"
	if peerEnd := tlsInfo.State.PeerCertificates[0].NotAfter; peerEnd.Before(end) {
		end, owner = peerEnd, "peer"
	}
	// The timer is monotonic: later jumps of the wall clock have no effect.
	timer := time.AfterFunc(time.Until(end), func() {
		handshake.log.Info("connection closed: SVID expired", "peer_id", handshake.peer.String(), "svid", owner, "not_after",
			end)
		// The raw connection: TLS would first send close_notify, for up to 5 s if the peer does not read.
		_ = raw.Close()
	})
	return &mutualConn{Conn: conn, timer: timer}, AuthInfo{AuthInfo: tlsInfo, ID: handshake.peer, End: end}
}

// ServerHandshake implements [credentials.TransportCredentials].
func (mutual *mutual) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	attrs := peerAttrs(raw) // read now, since a failed handshake closes the connection
	// Remains set for the first bytes of HTTP/2; gRPC then clears it.
	if err := raw.SetDeadline(time.Now().Add(mutual.timeout)); err != nil {
		return nil, nil, errors.Join(fmt.Errorf("deadline of the handshake: %w", err), raw.Close())
	}
	handshake, failure := mutual.newHandshake()
	var c net.Conn
	var info credentials.AuthInfo
	if failure == nil {
		var err error
		if c, info, err = credentials.NewTLS(handshake.tlsConfig()).ServerHandshake(raw); err != nil {
			failure = handshake.handshakeError(err)
		}
	}
	if failure != nil {
		mutual.logDenial(failure, attrs)
		_ = raw.Close()
		return nil, nil, failure
	}
	// A limited listener (endpoint.Limit) counts the connection for its peer.
	if limited, ok := raw.(interface{ Authenticated(spiffeid.ID) }); ok {
		limited.Authenticated(handshake.peer)
	}
	conn, authInfo := handshake.finish(c, raw, info)
	return conn, authInfo, nil
}

// logDenial logs a rejection: the client sees only the end of the connection.
func (mutual *mutual) logDenial(failure *HandshakeError, peer []any) {
	if failure.Reason == ReasonGone {
		// Probes of the socket, as by [Listen], close it without a handshake.
		mutual.log.Debug("client closed the connection during the TLS handshake", "error", failure.Err)
		return
	}
	attrs := append([]any{"reason", string(failure.Reason), "peer_id", failure.PeerID.String(), "error", failure.Err},
		peer...)
	mutual.throttle.Log(mutual.log.Warn, failure.PeerID.String()+" "+string(failure.Reason), "client refused", attrs...)
}

// ClientHandshake implements [credentials.TransportCredentials].
func (mutual *mutual) ClientHandshake(ctx context.Context, authority string, raw net.Conn) (net.Conn,
	credentials.AuthInfo,
	error,
) {
	handshake, failure := mutual.newHandshake()
	if failure != nil {
		return nil, nil, errors.Join(failure, raw.Close())
	}
	c, info, err := credentials.NewTLS(handshake.tlsConfig()).ClientHandshake(ctx, authority, raw)
	switch {
	case err != nil && err == ctx.Err():
		// The abandoned handshake may still be running and use handshake.
		return nil, nil, &HandshakeError{Reason: classify(err), Err: err}
	case err != nil:
		return nil, nil, handshake.handshakeError(err)
	}
	conn, authInfo := handshake.finish(c, raw, info)
	conn.ownID = handshake.svid.ID
	return conn, authInfo, nil
}

// Clone implements [credentials.TransportCredentials]. The credentials are immutable.
func (mutual *mutual) Clone() credentials.TransportCredentials { return mutual }

// mutualConn is a connection that ends with the certificates of its handshake.
type mutualConn struct {
	net.Conn
	timer *time.Timer
	// ownID is the SPIFFE ID that a client presented; zero on the server.
	ownID    spiffeid.ID
	received atomic.Bool // data arrived after the handshake
}

// Close closes the connection.
func (conn *mutualConn) Close() error {
	// The timer would otherwise keep the connection in memory until the certificate expires.
	conn.timer.Stop()
	return conn.Conn.Close()
}

// Read reads from the peer. A TLS 1.3 client finishes its handshake before the server has verified
// its certificate, so a rejection appears here.
func (conn *mutualConn) Read(b []byte) (int, error) {
	n, err := conn.Conn.Read(b)
	if n > 0 && !conn.ownID.IsZero() {
		conn.received.Store(true)
	}
	if err == nil || conn.ownID.IsZero() || conn.received.Load() {
		return n, err
	}
	switch classify(err) {
	case ReasonRefusedByPeer, ReasonGone:
		return n, fmt.Errorf("the server closed the connection after the handshake: it probably rejected the SVID %s; "+
			"check the server's log: %w", conn.ownID, err)
	}
	return n, err
}
