// Package gobgpview reads the sessions of a GoBGP that another program runs, over its gRPC API.
package gobgpview

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/timestamppb"

	gobgpv1 "github.com/vipgate/vipgate/pkg/api/gobgp/v1"
	"github.com/vipgate/vipgate/pkg/speaker"
	"github.com/vipgate/vipgate/pkg/vip"
)

// DefaultAddress is where gobgpd serves its API.
const DefaultAddress = "127.0.0.1:50051"

const (
	callTimeout = 2 * time.Second
	maxMessages = 1_000_000 // of one call: peers or prefixes
)

// api is a version of GoBGP's API. The versions differ in names, and in some values.
type api struct {
	version, service string
	adjRIBOut        uint32 // its TableType
}

var apis = [...]api{
	{"GoBGP 3", "/apipb.GobgpApi/", 3},
	{"GoBGP 4", "/api.GoBgpService/", 4},
}

// View reads a GoBGP. It is not safe for concurrent use.
type View struct {
	conn *grpc.ClientConn
	api  api // the last version that answered
}

var _ speaker.View = (*View)(nil)

// New returns the view of the GoBGP whose API has an address, such as 127.0.0.1:50051 or
// unix:///run/gobgp.sock. The connection has neither encryption nor identities, so another host's
// address is refused.
func New(address string) (*View, error) {
	at, err := netip.ParseAddrPort(address)
	if !strings.HasPrefix(address, "unix:") && (err != nil || !at.Addr().IsLoopback()) {
		return nil, fmt.Errorf("GoBGP's API at %q has no authentication; use a loopback address such as 127.0.0.1:50051, or "+
			"unix:///PATH", address)
	}
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithNoProxy())
	if err != nil {
		return nil, fmt.Errorf("failed to use GoBGP's API at %s: %w", address, err)
	}
	return &View{conn: conn, api: apis[0]}, nil
}

// Close ends the connection.
func (view *View) Close() error { return view.conn.Close() }

// list calls a method of each version of the API until one is implemented, and passes each message
// of the answer to a function.
func list[T any, M interface {
	*T
	proto.Message
}](ctx context.Context, view *View, method string, request func(api) proto.Message, each func(M)) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	err := call(ctx, view, view.api, method, request, each)
	for _, other := range apis {
		if status.Code(err) == codes.Unimplemented && other != view.api {
			if err = call(ctx, view, other, method, request, each); err == nil {
				view.api = other
			}
		}
	}
	if err != nil {
		return fmt.Errorf("failed to read %s from GoBGP at %s: %w", method, view.conn.Target(), err)
	}
	return nil
}

func call[T any, M interface {
	*T
	proto.Message
}](ctx context.Context, view *View, version api, method string, request func(api) proto.Message, each func(M)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := view.conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, version.service+method)
	if err != nil {
		return err
	}
	// After an EOF the answer has the error.
	if err := stream.SendMsg(request(version)); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	if err := stream.CloseSend(); err != nil {
		return err
	}
	for range maxMessages {
		message := M(new(T))
		if err := stream.RecvMsg(message); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		each(message)
	}
	return fmt.Errorf("more than %d answers", maxMessages)
}

// Sessions returns the sessions of all neighbors.
func (view *View) Sessions(ctx context.Context) (version string, sessions []speaker.Session, err error) {
	request := func(api) proto.Message { return &gobgpv1.ListPeerRequest{EnableAdvertised: true} }
	err = list(ctx, view, "ListPeer", request, func(response *gobgpv1.ListPeerResponse) {
		sessions = append(sessions, sessionsOf(response.GetPeer())...)
	})
	return view.api.version, sessions, err
}

// states are the states of a session, RFC 4271 section 8.2.2. The last one is for later numbers.
var states = [...]string{"Unknown", "Idle", "Connect", "Active", "OpenSent", "OpenConfirm", "Established", "Unknown"}

const established = 6

// sessionsOf returns the session of each configured family of a neighbor.
func sessionsOf(peer *gobgpv1.Peer) (sessions []speaker.Session) {
	conf, state := peer.GetConf(), peer.GetState()
	address, _ := netip.ParseAddr(cmp.Or(state.GetNeighborAddress(), conf.GetNeighborAddress())) // zero if invalid
	offered := offers(state.GetRemoteCap())
	for _, afiSafi := range peer.GetAfiSafis() {
		family, ok := familyOf(afiSafi.GetConfig().GetFamily())
		if !ok {
			continue
		}
		session := speaker.Session{
			Peer: address, Name: cmp.Or(conf.GetNeighborInterface(), conf.GetDescription()), Family: family,
			Up:       state.GetSessionState() == established,
			State:    states[min(int(state.GetSessionState()), len(states)-1)],
			Since:    since(peer.GetTimers().GetState().GetDowntime()),
			Imported: int(afiSafi.GetState().GetAccepted()), LastError: state.GetDisconnectMessage(),
		}
		if session.Up {
			session.Since = since(peer.GetTimers().GetState().GetUptime())
			if session.Up = offered[family]; !session.Up {
				session.LastError = fmt.Sprintf("the peer has not activated %s unicast", family)
			}
		}
		// GoBGP counts routes for a session without the family, too.
		if session.Up {
			session.Exported = int(afiSafi.GetState().GetAdvertised())
		}
		sessions = append(sessions, session)
	}
	return sessions
}

// since converts a time that may be missing.
func since(t *timestamppb.Timestamp) time.Time {
	if t.GetSeconds() <= 0 {
		return time.Time{}
	}
	return t.AsTime()
}

// offers returns the families in the neighbor's OPEN message, of either version of the API.
func offers(list [][]byte) (families [len(vip.Families)]bool) {
	for _, encoded := range list {
		var named anypb.Any
		multiprotocol := &gobgpv1.MultiProtocolCapability{}
		var capability gobgpv1.Capability
		switch {
		case proto.Unmarshal(encoded, &named) == nil && named.GetTypeUrl() != "":
			if !strings.HasSuffix(named.GetTypeUrl(), ".MultiProtocolCapability") ||
				proto.Unmarshal(named.GetValue(), multiprotocol) != nil {
				continue
			}
		case proto.Unmarshal(encoded, &capability) == nil:
			multiprotocol = capability.GetMultiProtocol()
		}
		if family, ok := familyOf(multiprotocol.GetFamily()); ok {
			families[family] = true
		}
	}
	return families
}

func familyOf(family *gobgpv1.Family) (vip.Family, bool) {
	for _, f := range vip.Families {
		if proto.Equal(family, encode(f)) {
			return f, true
		}
	}
	return 0, false
}

// encode returns AFI and SAFI of a family.
func encode(family vip.Family) *gobgpv1.Family {
	const unicast = 1
	return &gobgpv1.Family{Afi: uint32(family) + 1, Safi: unicast}
}

// Exported returns the VIPs that GoBGP sends to a neighbor, after its export policy.
func (view *View) Exported(ctx context.Context, peer netip.Addr, family vip.Family) (vip.Set, error) {
	exported := vip.Set{}
	// GoBGP has no Adj-RIB-Out: it computes the answer, for a neighbor without a session as well.
	_, sessions, err := view.Sessions(ctx)
	if err != nil || !slices.ContainsFunc(sessions, func(session speaker.Session) bool {
		return session.Peer == peer && session.Family == family && session.Up
	}) {
		return exported, err
	}
	request := func(version api) proto.Message {
		return &gobgpv1.ListPathRequest{TableType: version.adjRIBOut, Name: peer.String(), Family: encode(family)}
	}
	err = list(ctx, view, "ListPath", request, func(response *gobgpv1.ListPathResponse) {
		if v, err := vip.Parse(response.GetDestination().GetPrefix()); err == nil && v.Family() == family {
			exported[v] = struct{}{}
		}
	})
	return exported, err
}
