package nsp

import nspv1 "github.com/vipgate/vipgate/pkg/api/nsp/v1"

// bgpAuth returns the Secret of a gateway's password and the key in it, nil without a password. As
// in Meridio, that is an object without names, or the protocol static.
func bgpAuth(g *nspv1.Gateway) *nspv1.Gateway_BgpAuth {
	auth := g.GetBgpAuth()
	if g.GetProtocol() == static || auth.GetKeySource() == "" && auth.GetKeyName() == "" {
		return nil
	}
	return auth
}
