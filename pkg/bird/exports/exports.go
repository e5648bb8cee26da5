package exports

import (
	"context"
	"fmt"
	"math"
	"strconv"
	"strings"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	"github.com/vipgate/vipgate/pkg/bird"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Read returns how BIRD exports a VIP to BGP gateways. A gateway that does not receive the VIP is
// absent. Read has a connection to BIRD's control socket of its own, so that it delays no poll.
func Read(ctx context.Context, socket string, gateways []string, prefix vip.VIP) ([]*frontendv1.Export, error) {
	client, err := bird.Dial(ctx, socket)
	if err != nil {
		return nil, err
	}
	defer client.Close()
	var all []*frontendv1.Export
	for _, gateway := range gateways {
		protocol := "'NBR-" + gateway + "'"
		// "exported" lists the routes that were sent, "export" the attributes after the export filter.
		sent, err := client.Command(ctx, fmt.Sprintf("show route for %s exported %s", prefix, protocol))
		if err != nil {
			return nil, err
		}
		if !strings.Contains(joined(sent), prefix.String()) {
			continue
		}
		route, err := client.Command(ctx, fmt.Sprintf("show route for %s all export %s", prefix, protocol))
		if err != nil {
			return nil, err
		}
		session, err := client.Command(ctx, "show protocols all "+protocol)
		if err != nil {
			return nil, err
		}
		all = append(all, parse(gateway, joined(route), joined(session)))
	}
	return all, nil
}

func joined(reply bird.Reply) string {
	var text strings.Builder
	for _, line := range reply {
		text.WriteString(line.Text + "\n")
	}
	return text.String()
}

// parse returns the export of the first route, as the session encodes it: toward another AS with
// the
// own AS number and without LOCAL_PREF (RFC 4271, section 5.1). BIRD shows the next hop with the
// session.
func parse(gateway, route, session string) *frontendv1.Export {
	export := &frontendv1.Export{Gateway: gateway}
	var localAS, neighborAS uint32
	for line := range strings.Lines(session) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		switch value = strings.TrimSpace(value); name {
		case "BGP Next hop":
			// An IPv6 session may have a link-local address as the second one.
			export.NextHop, _, _ = strings.Cut(value, " ")
		case "Local AS":
			localAS = number(value)
		case "Neighbor AS":
			neighborAS = number(value)
		}
	}
	if localAS != neighborAS {
		export.AsPath = append(export.AsPath, localAS)
	}
	for line := range strings.Lines(route) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		// BIRD 2 has BGP.as_path, BIRD 3 bgp_path.
		name = strings.TrimPrefix(strings.TrimPrefix(name, "BGP."), "bgp_")
		switch name {
		case "as_path", "path":
			for as := range strings.FieldsSeq(value) {
				export.AsPath = append(export.AsPath, number(as))
			}
		case "community":
			for community := range strings.FieldsSeq(value) {
				export.Communities = append(export.Communities, strings.ReplaceAll(strings.Trim(community, "()"), ",", ":"))
			}
		case "large_community":
			text := strings.ReplaceAll(value, ", ", ":") // (1, 2, 3)
			for community := range strings.FieldsSeq(text) {
				export.Communities = append(export.Communities, strings.Trim(community, "()"))
			}
		case "ext_community":
			export.LinkBandwidth = linkBandwidth(value)
		case "med":
			med := number(value)
			export.Med = &med
		case "local_pref":
			if preference := number(value); localAS == neighborAS {
				export.LocalPreference = &preference
			}
		}
	}
	return export
}

// linkBandwidth returns the link bandwidth of extended communities, 0 without one. BIRD has no name
// for the type and shows (unknown 0x4, 8103, 1260617728), with the bits of the number.
func linkBandwidth(communities string) float32 {
	for community := range strings.SplitSeq(communities, "(") {
		fields := strings.Split(strings.Trim(community, ") "), ", ")
		if len(fields) == 3 && fields[0] == "unknown 0x4" {
			return math.Float32frombits(number(fields[2]))
		}
	}
	return 0
}

// number returns the number of a text, 0 without one.
func number(text string) uint32 {
	value, _ := strconv.ParseUint(strings.TrimSpace(text), 10, 32)
	return uint32(value)
}
