package status

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
)

// gatewayRemedies maps parts of BIRD's error or of the state to the remedy; the first one counts.
var gatewayRemedies = []struct{ part, next string }{
	{"Bad peer AS", "correct remoteASN or localASN of the gateway in the trench file, or the neighbor at the router"},
	{"Neighbor lost", "`ip -br link`: is the interface toward the gateways up? Then the link, `ping ADDRESS` from here"},
	{"Connection closed", "`ping ADDRESS` from here; does BGP run at the router?"},
	{
		"Connection refused",
		"start BGP at the router, with this pod as a neighbor, or correct remotePort in the trench file",
	},
	{"password file", "create the file, or correct passwordFile of the gateway in the trench file"},
	{"No route to host", "`ping ADDRESS` from here; correct address, interface or VLAN"},
	{"nreachable", "`ip -br link`, `ping ADDRESS` from here; correct address, interface or VLAN"},
	{"hold time", "give the router a hold time of at least 3 s, or correct holdTime in the trench file"},
	{"dministrative", "ask the router's operator: the neighbor is shut down there"},
	{"refix", "raise the router's prefix limit for this neighbor, or advertise fewer VIPs"},
}

// gatewayRemedy returns what to do about a gateway that is down.
func gatewayRemedy(gateway *frontendv1.GatewayStatus) string {
	// BIRD needs quotes around a name with a hyphen, and the shell must not remove them.
	inspect := "`birdc \"show protocols all 'NBR-" + gateway.GetName() + "'\"`"
	if strings.HasPrefix(gateway.GetChange(), "change pending") {
		return "`frontend apply-now` makes the change without its turn; " + inspect
	}
	// The parameters of a change are no errors.
	text := gateway.GetState() + " " + gateway.GetLastError()
	for _, remedy := range gatewayRemedies {
		if strings.Contains(text, remedy.part) {
			return strings.ReplaceAll(remedy.next, "ADDRESS", gateway.GetAddress()) + "; " + inspect
		}
	}
	switch {
	case gateway.GetProtocol() == "static":
		return "configure BFD to this pod at the gateway, or leave bfd out in the trench file; `birdc show bfd sessions`"
	case gateway.GetState() == stateDisabled:
		return "`birdc \"enable 'NBR-" + gateway.GetName() + "'\"`: another process disabled it"
	case isSilent(gateway):
		return "`ping " + gateway.GetAddress() + "` from here; correct its address, VLAN or password; " + inspect
	}
	return inspect + "; link, VLAN, AS numbers and password of the gateway"
}

// isSilent reports whether a gateway is down and silent: it answers neither TCP nor BFD.
func isSilent(gateway *frontendv1.GatewayStatus) bool {
	isChanged := gateway.GetChange() == "" || strings.HasPrefix(gateway.GetChange(), "changing")
	return !gateway.GetUp() && gateway.GetLastError() == "" && isChanged &&
		(slices.Contains([]string{"Connect", "Active"}, gateway.GetState()) || gateway.GetProtocol() == "static")
}

// stateDisabled is BIRD's state of a BGP session that was disabled.
const stateDisabled = "Down"

// attributes returns the attributes of an exported route as the end of a text; "" if unknown.
func attributes(export *frontendv1.Export) string {
	if export == nil {
		return ""
	}
	path := "empty"
	if len(export.GetAsPath()) > 0 {
		path = strings.Trim(fmt.Sprint(export.GetAsPath()), "[]")
	}
	text := " (next hop " + cmp.Or(export.GetNextHop(), none) + ", AS path " + path
	if bandwidth := export.GetLinkBandwidth(); bandwidth > 0 {
		text += fmt.Sprintf(", link bandwidth %.4g Mbit/s", bandwidth*8/1e6)
	}
	if export.LocalPreference != nil {
		text += fmt.Sprintf(", LOCAL_PREF %d", export.GetLocalPreference())
	}
	if export.Med != nil {
		text += fmt.Sprintf(", MED %d", export.GetMed())
	}
	for _, community := range export.GetCommunities() {
		if community == gracefulShutdown {
			community = "GRACEFUL_SHUTDOWN"
		}
		text += ", community " + community
	}
	return text + ")"
}

// gracefulShutdown is the community of RFC 8326.
const gracefulShutdown = "65535:0"

// gateways adds each gateway of the VIP's family.
func (chain *Chain) gateways(status *frontendv1.Status, report *frontendv1.VipStatus, now time.Time) {
	found := false
	for _, gateway := range status.GetGateways() {
		if gatewayFamily(gateway) != familyOf(chain.VIP) {
			continue
		}
		found = true
		receives := slices.Contains(report.GetGateways(), gateway.GetName())
		text := fmt.Sprintf("%s is %s since %s", gateway.GetName(), strings.ToLower(upOrDown(gateway.GetUp())),
			ago(gateway.GetSince(), now))
		next := gatewayRemedy(gateway)
		switch {
		case receives && gateway.GetExport() == "depreferred":
			text += " and receives the VIP de-preferred"
		case receives && chain.exports != nil && chain.exports[gateway.GetName()] == nil && gateway.GetProtocol() == "bgp":
			receives = false
			text += " and BIRD does not export the VIP to it"
			next = "`birdc \"show route noexport 'NBR-" + gateway.GetName() +
				"'\"`: did another process change BIRD's configuration?"
		case receives:
			text += " and receives the VIP"
		case gateway.GetUp():
			text += " and does not receive the VIP"
			next = "the gate above"
		}
		if receives {
			text += attributes(chain.exports[gateway.GetName()])
		}
		if gateway.GetDrained() {
			text += ", drained by an operator" + drainEnd(gateway.GetDrainEnds(), now)
			next = "`frontend undrain --gateway=" + gateway.GetName() + "`"
		}
		problems, compare := sessionProblems(status, gateway, now)
		state := strings.TrimSuffix(gateway.GetState(), " ("+gateway.GetLastError()+")")
		for _, detail := range append([]string{gateway.GetChange(), state}, problems...) {
			if detail != "" && !(gateway.GetUp() && detail == gateway.GetState()) {
				text += ", " + strings.TrimPrefix(detail, "down: ")
			}
		}
		if compare != "" && !gateway.GetDrained() {
			next += "; " + compare
		}
		switch {
		case isSilent(gateway):
			text += ": it does not answer"
		case !gateway.GetUp() && gateway.GetProtocol() != "static" && gateway.GetState() == stateDisabled:
			text += ": disabled in BIRD"
		}
		_, remedy, warned := strings.Cut(gateway.GetWarning(), "; ")
		if receives && warned {
			chain.note(gatewayStep, text, remedy)
			continue
		}
		chain.add(gatewayStep, receives, text, next)
	}
	if !found {
		chain.add(gatewayStep, false, "no gateway of the VIP's family is configured",
			"add one with an "+familyOf(chain.VIP)+" address to attractor.gateways")
	}
}
