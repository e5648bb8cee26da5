package gobgpview

import (
	"math"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	gobgpv1 "github.com/vipgate/vipgate/pkg/api/gobgp/v1"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
)

func TestAddressOfAnotherHostIsRefused(t *testing.T) {
	for _, address := range []string{"192.0.2.1:50051", "[fd00::1]:50051", "gobgp.example:50051", "127.0.0.1", ""} {
		_, err := New(address)
		harness.WantError(t, err, "use a loopback address such as 127.0.0.1:50051, or unix:///PATH")
	}
	for _, address := range []string{"127.0.0.1:50051", "[::1]:50051", "unix:///run/gobgp.sock"} {
		view, err := New(address)
		harness.Must(t, err)
		harness.Must(t, view.Close())
	}
}

// A session has a family only if the neighbor offered it, as both versions of the API encode it.
func TestFamilyNeedsOffer(t *testing.T) {
	encoded := func(message proto.Message) []byte {
		t.Helper()
		b, err := proto.Marshal(message)
		harness.Must(t, err)
		return b
	}
	offer := &gobgpv1.MultiProtocolCapability{Family: encode(vip.IPv6)}
	const prefix = "type.googleapis.com/apipb."
	others := [][]byte{
		encoded(&anypb.Any{TypeUrl: prefix + "RouteRefreshCapability"}),
		encoded(&anypb.Any{TypeUrl: prefix + "AddPathCapability", Value: encoded(offer)}),
		encoded(&gobgpv1.Capability{}),
		{0xff},
		nil,
	}
	for name, capability := range map[string][]byte{
		"GoBGP 3": encoded(&anypb.Any{TypeUrl: prefix + "MultiProtocolCapability", Value: encoded(offer)}),
		"GoBGP 4": encoded(&gobgpv1.Capability{MultiProtocol: offer}),
	} {
		sessions := sessionsOf(&gobgpv1.Peer{
			Conf:  &gobgpv1.PeerConf{NeighborAddress: "192.0.2.1", Description: "router"},
			State: &gobgpv1.PeerState{SessionState: established, RemoteCap: append(others, capability)},
			AfiSafis: []*gobgpv1.AfiSafi{
				{Config: &gobgpv1.AfiSafiConfig{Family: encode(vip.IPv4)}, State: &gobgpv1.AfiSafiState{Advertised: 7}},
				{Config: &gobgpv1.AfiSafiConfig{Family: encode(vip.IPv6)}, State: &gobgpv1.AfiSafiState{Advertised: 5}},
				{Config: &gobgpv1.AfiSafiConfig{Family: &gobgpv1.Family{Afi: 25, Safi: 70}}},
			},
		})
		if len(sessions) != 2 || sessions[0].Up || sessions[0].Exported != 0 || !sessions[1].Up ||
			sessions[1].Exported != 5 || sessions[0].LastError != "the peer has not activated ipv4 unicast" ||
			sessions[0].Name != "router" {
			t.Errorf("%s: %+v", name, sessions)
		}
	}
}

// FuzzPeer reads a neighbor of any content: its sessions have known families, and are established, or
// up, only if the neighbor is.
func FuzzPeer(f *testing.F) {
	family := &gobgpv1.AfiSafi{Config: &gobgpv1.AfiSafiConfig{Family: encode(vip.IPv6)}}
	for _, peer := range []*gobgpv1.Peer{
		{Conf: &gobgpv1.PeerConf{NeighborAddress: "192.0.2.1"}, AfiSafis: []*gobgpv1.AfiSafi{family}},
		{
			State:    &gobgpv1.PeerState{SessionState: established, RemoteCap: [][]byte{{0xff}}},
			AfiSafis: []*gobgpv1.AfiSafi{family},
		},
		{State: &gobgpv1.PeerState{SessionState: math.MaxUint32}, AfiSafis: []*gobgpv1.AfiSafi{family}},
	} {
		b, err := proto.Marshal(peer)
		harness.Must(f, err)
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var peer gobgpv1.Peer
		if proto.Unmarshal(b, &peer) != nil {
			return
		}
		for _, session := range sessionsOf(&peer) {
			is := peer.GetState().GetSessionState() == established
			if int(session.Family) >= len(vip.Families) || session.Up && !is || (session.State == "Established") != is {
				t.Errorf("%+v", session)
			}
		}
	})
}
