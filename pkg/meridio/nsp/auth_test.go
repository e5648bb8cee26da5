package nsp

import (
	"testing"

	nspv1 "github.com/vipgate/vipgate/pkg/api/nsp/v1"
	"github.com/vipgate/vipgate/pkg/trench"
)

func TestGatewayWithoutPassword(t *testing.T) {
	for name, change := range map[string]func(*nspv1.Gateway){
		"no object":          func(*nspv1.Gateway) {},
		"object of no names": func(g *nspv1.Gateway) { g.BgpAuth = &nspv1.Gateway_BgpAuth{} },
		"static": func(g *nspv1.Gateway) {
			g.Protocol, g.BgpAuth = "static", &nspv1.Gateway_BgpAuth{KeyName: "k", KeySource: "s"}
		},
	} {
		t.Run(name, func(t *testing.T) {
			o := &Options{Trench: "t", Attractor: "a", Defaults: trench.DefaultDefaults()} // without Keys
			g := gateway("gw4", "169.254.100.150")
			change(g)
			c, err := o.convert(attractor(vips("20.0.0.1/32"), g))
			if err != nil || len(c.refused) > 0 || len(c.Attractor.Gateways) != 1 {
				t.Fatalf("refused are %v, error %v", c.refused, err)
			}
			if file := c.Attractor.Gateways[0].PasswordFile; file != "" {
				t.Errorf("the password file is %s", file)
			}
		})
	}
	for _, auth := range []*nspv1.Gateway_BgpAuth{{KeyName: "k"}, {KeySource: "s"}} {
		o := &Options{Trench: "t", Attractor: "a", Defaults: trench.DefaultDefaults(), Keys: &keys{}}
		g := gateway("gw4", "169.254.100.150")
		g.BgpAuth = auth
		// An incomplete name is refused: without a password the session would be established unsigned.
		if c, err := o.convert(attractor(vips("20.0.0.1/32"), g)); err != nil || len(c.refused) != 1 {
			t.Errorf("%v: refused are %v, error %v", auth, c.refused, err)
		}
	}
}
