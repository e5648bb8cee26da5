// Package birdview reads the sessions of a BIRD that another program runs, over its control socket.
package birdview

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/vipgate/vipgate/pkg/bird"
	"github.com/vipgate/vipgate/pkg/speaker"
	"github.com/vipgate/vipgate/pkg/vip"
)

// DefaultSocket is BIRD's control socket in Debian, which the group bird may use.
const DefaultSocket = "/run/bird/bird.ctl"

// View reads a BIRD. It connects for each call and restricts the connection to reading first. BIRD
// closes no idle client, and a client that waits for an answer is bounded by pkg/bird.
type View struct{ socket string }

var _ speaker.View = View{}

// New returns the view of the BIRD with a control socket.
func New(socket string) View { return View{socket} }

// protocols runs after on a restricted connection, with BIRD's BGP sessions.
func (view View) protocols(ctx context.Context, after func(*bird.Client, []bird.Protocol) error) (err error) {
	client, err := bird.Dial(ctx, view.socket)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, client.Close()) }()
	if _, err := client.Command(ctx, "restrict"); err != nil {
		return err
	}
	reply, err := client.Command(ctx, "show protocols all")
	if err != nil {
		return err
	}
	var sessions []bird.Protocol
	for _, protocol := range bird.ParseProtocols(reply) {
		if protocol.Proto == "BGP" {
			sessions = append(sessions, protocol)
		}
	}
	return after(client, sessions)
}

// Sessions returns the sessions of all BGP protocols.
func (view View) Sessions(ctx context.Context) (version string, list []speaker.Session, err error) {
	err = view.protocols(ctx, func(client *bird.Client, protocols []bird.Protocol) error {
		version = "BIRD " + client.Version
		for _, protocol := range protocols {
			for _, family := range vip.Families {
				channel := protocol.Channels[family]
				if !channel.Configured {
					continue
				}
				session := speaker.Session{
					Peer: protocol.Neighbor, Name: protocol.Name, Family: family, Up: protocol.Up() && channel.Up,
					State: cmp.Or(protocol.BGPState, protocol.State), LastError: protocol.LastError,
					Imported: channel.Imported, Exported: channel.Exported,
				}
				if protocol.Up() && !channel.Up {
					session.LastError = fmt.Sprintf("the peer has not activated %s unicast", family)
				}
				list = append(list, session)
			}
		}
		return nil
	})
	return version, list, err
}

// Exported returns the VIPs that BIRD sends to a peer, after its export filter.
func (view View) Exported(ctx context.Context, peer netip.Addr, family vip.Family) (vip.Set, error) {
	exported := vip.Set{}
	err := view.protocols(ctx, func(client *bird.Client, protocols []bird.Protocol) error {
		for _, protocol := range protocols {
			if protocol.Neighbor != peer || !protocol.Up() || !protocol.Channels[family].Up {
				continue
			}
			return client.Scan(ctx, "show route exported '"+protocol.Name+"'", func(line string) {
				if v, ok := bird.RouteOf(line); ok && v.Family() == family {
					exported[v] = struct{}{}
				}
			})
		}
		return nil
	})
	return exported, err
}
