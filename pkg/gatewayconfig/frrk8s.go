package gatewayconfig

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// MaxFRRK8sPort is the highest port of a neighbor that the API of frr-k8s allows.
const MaxFRRK8sPort = 16384

// FRRK8s describes how the daemon of frr-k8s on each node calls the announcers of a trench. The
// sessions with the gateways are configured elsewhere, by MetalLB or another FRRConfiguration.
type FRRK8s struct {
	Name, Namespace   string // of the FRRConfiguration; Namespace is the one of frr-k8s
	ASN, AnnouncerASN uint32 // of FRR, and of the announcers in the session with it
	// Announcers lists the addresses that trench pods can have on a node, the same on every node.
	Announcers []netip.Addr
	Port       uint16 // of the announcers, at most MaxFRRK8sPort
	VIPs       []vip.VIP
	// Gateways lists the neighbors of FRR that get the VIPs, in the form of frr-k8s's route maps.
	Gateways []string
}

// Of adds the VIPs and the gateways of a trench.
func (f FRRK8s) Of(config *trench.Config) FRRK8s {
	f.VIPs = config.Attractor.VIPs
	for _, gateway := range config.Attractor.Gateways {
		if gateway.Protocol != trench.Static {
			f.Gateways = append(f.Gateways, gateway.Peer())
		}
	}
	return f
}

// Text returns the FRRConfiguration. The API allows a neighbor the prefixes of `network` statements
// only, which FRR advertises without an announcer. Its raw configuration adds an entry to the route
// map of each gateway: the AS path begins with the announcers' AS, and from those FRR accepts no
// other prefixes than the VIPs.
func (f FRRK8s) Text() (string, error) {
	switch {
	case f.ASN == 0:
		return "", errors.New("the ASN of FRR is missing; write the one of MetalLB's BGPPeers (myASN)")
	case f.ASN == f.AnnouncerASN:
		return "", fmt.Errorf("AS %d is FRR's and the announcers'; the announcers need another one", f.ASN)
	case len(f.Announcers) == 0:
		return "", errors.New("no addresses of announcers; name those that the pods can have on a node")
	case f.Port == 0 || f.Port > MaxFRRK8sPort:
		return "", fmt.Errorf("the announcers' port %d is outside of 1 to %d, which frr-k8s allows", f.Port, MaxFRRK8sPort)
	}
	var text strings.Builder
	if err := templates.ExecuteTemplate(&text, "frrk8s.tmpl", f); err != nil {
		return "", fmt.Errorf("failed to render the FRRConfiguration: %w", err)
	}
	return text.String(), nil
}
