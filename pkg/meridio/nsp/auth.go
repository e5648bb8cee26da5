package nsp

import (
	nspv1 "github.com/vipgate/vipgate/pkg/api/nsp/v1"
	"github.com/vipgate/vipgate/pkg/trench"
)

// bgpAuth returns the Secret and the key of a gateway's password, or nil without a password. As in
// Meridio, a gateway has no password if bgpAuth has no names, or if its protocol is static.
func bgpAuth(g *nspv1.Gateway) *nspv1.Gateway_BgpAuth {
	auth := g.GetBgpAuth()
	if g.GetProtocol() == trench.Static.String() || auth.GetKeySource() == "" && auth.GetKeyName() == "" {
		return nil
	}
	return auth
}
