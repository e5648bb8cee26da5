package meridio2

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/vipgate/vipgate/pkg/kube/translation"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// maxName is the maximum length of a name in the trench file.
const maxName = 60

// Translate returns the trench file of a Gateway and its GatewayRouters. Result.Trench is the
// verdict on the Gateway; Result.Services lists the verdicts on the GatewayRouters, sorted by
// name.
func Translate(o Objects) translation.Result {
	r := translation.Result{Trench: translation.Verdict{Object: corev1.ObjectReference{
		APIVersion: gatewayVersion.String(), Kind: gatewayKind.Kind,
	}}}
	if o.Gateway == nil {
		r.Trench.Reason, r.Trench.Message = ReasonNotFound, "the Gateway does not exist: create it"
		return r
	}
	r.Trench = translation.Verdict{Object: reference(o.Gateway), Generation: o.Gateway.GetGeneration()}
	if o.Gateway.GetDeletionTimestamp() != nil {
		r.Trench.Reason, r.Trench.Message = ReasonDeleting, "the Gateway is being deleted: create it again to change it"
		return r
	}
	t := translator{gateway: o.Gateway}
	if err := t.translate(o.Routers); err != nil {
		r.Trench.Reason, r.Trench.Message = ReasonInvalid, err.Error()
		return r
	}
	r.File, r.Services = t.file(t.accepted), t.verdicts
	r.Trench.Accepted, r.Trench.Reason, r.Trench.Problems = true, ReasonValid, t.problems
	r.Trench.Message = "the trench file is written"
	return r
}

func reference(u *unstructured.Unstructured) corev1.ObjectReference {
	return corev1.ObjectReference{
		APIVersion: u.GetAPIVersion(), Kind: u.GetKind(), Namespace: u.GetNamespace(), Name: u.GetName(), UID: u.GetUID(),
	}
}

// translator holds the state of one translation.
type translator struct {
	gateway  *unstructured.Unstructured
	vips     []vip.VIP
	problems []translation.Problem // problems of the Gateway
	accepted []candidate           // sorted by name at the end
	verdicts []translation.ServiceVerdict
}

// candidate is a GatewayRouter that may be accepted.
type candidate struct {
	name string
	router
}

// refusal is why a GatewayRouter is refused.
type refusal struct{ reason, message string }

// translate sets the verdicts on all objects. It returns the reason why the Gateway is refused.
func (t *translator) translate(routers []*unstructured.Unstructured) error {
	if err := t.readVIPs(); err != nil {
		return err
	}
	// Validate the Gateway without GatewayRouters first, so that each later problem belongs to one
	// GatewayRouter.
	if problem := t.refused(nil); problem != nil {
		return errors.New(gatewayPath(problem))
	}
	routers = slices.Clone(routers)
	slices.SortFunc(routers, older)
	for _, u := range routers {
		if !refersTo(u, t.gateway) || u.GetDeletionTimestamp() != nil {
			continue
		}
		v := translation.ServiceVerdict{Verdict: translation.Verdict{Object: reference(u), Generation: u.GetGeneration()}}
		c, refused := t.judge(u)
		if refused == nil {
			v.Accepted, v.Reason = true, ReasonAccepted
			v.Message = fmt.Sprintf("is gateway %s of interface %s", c.name, c.Spec.Interface)
			t.accepted = append(t.accepted, c)
		} else {
			v.Reason, v.Message = refused.reason, refused.message
		}
		t.verdicts = append(t.verdicts, v)
	}
	slices.SortFunc(t.accepted, func(a, b candidate) int { return cmp.Compare(a.name, b.name) })
	slices.SortFunc(t.verdicts, func(a, b translation.ServiceVerdict) int {
		return cmp.Or(cmp.Compare(a.Object.Name, b.Object.Name), cmp.Compare(a.Object.UID, b.Object.UID))
	})
	if problem := t.refused(t.accepted); problem != nil {
		return errors.New(problem.Field + ": " + problem.Message)
	}
	return nil
}

// older compares GatewayRouters by age. Of two conflicting ones the older is accepted.
func older(a, b *unstructured.Unstructured) int {
	x, y := a.GetCreationTimestamp(), b.GetCreationTimestamp()
	return cmp.Or(x.Time.Compare(y.Time), cmp.Compare(a.GetName(), b.GetName()), cmp.Compare(a.GetUID(), b.GetUID()))
}

// readVIPs reads the addresses of the Gateway's status. An invalid VIP is reported as a problem.
func (t *translator) readVIPs() error {
	var g gateway
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(t.gateway.Object, &g); err != nil {
		return fmt.Errorf("failed to decode the Gateway: %w", err)
	}
	seen := map[string]bool{}
	for _, a := range g.Status.Addresses {
		// The default type is IPAddress. Meridio 2 ignores any other type, too.
		if a.Type != nil && *a.Type != "IPAddress" || seen[a.Value] {
			continue
		}
		seen[a.Value] = true
		v, err := readVIP(a.Value)
		if err != nil {
			t.problems = append(t.problems, translation.Problem{
				Object: reference(t.gateway), Reason: ReasonInvalidAddress,
				Message: fmt.Sprintf("status.addresses: %v; change destinationCIDRs of the L34Route that has it", err),
			})
			continue
		}
		t.vips = append(t.vips, v)
	}
	slices.SortFunc(t.vips, vip.Compare)
	t.vips = slices.Compact(t.vips)
	slices.SortFunc(t.problems, func(a, b translation.Problem) int { return cmp.Compare(a.Message, b.Message) })
	return nil
}

func readVIP(address string) (vip.VIP, error) {
	a, err := netip.ParseAddr(address)
	if err != nil || a.Zone() != "" {
		return vip.VIP{}, fmt.Errorf("%q is not the address of a VIP", address)
	}
	return vip.FromPrefix(netip.PrefixFrom(a, a.BitLen()))
}

// judge validates a GatewayRouter, alone and together with the accepted ones.
func (t *translator) judge(u *unstructured.Unstructured) (c candidate, refused *refusal) {
	c.name = u.GetName()
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, &c.router); err != nil {
		return c, &refusal{ReasonInvalid, "failed to decode the GatewayRouter: " + err.Error()}
	}
	switch {
	case c.Spec.Protocol != protocolBGP && c.Spec.Protocol != protocolStatic:
		return c, &refusal{ReasonInvalid, fmt.Sprintf("spec.protocol: is %q: write BGP or Static", c.Spec.Protocol)}
	case c.Spec.Protocol == protocolBGP && c.Spec.BGP == nil:
		return c, &refusal{ReasonInvalid, "spec.bgp: is missing: write remoteASN and localASN"}
	case c.Spec.Protocol == protocolStatic && c.Spec.Static == nil:
		return c, &refusal{ReasonInvalid, "spec.static: is missing: write static: {} or its bfd"}
	case c.Spec.Interface == "":
		return c, &refusal{ReasonInvalid, "spec.interface: is missing: write the name of an interface"}
	case len(c.name) > maxName:
		return c, &refusal{ReasonNameTooLong, fmt.Sprintf("metadata.name: has %d characters: "+
			"create the GatewayRouter with a name of %d at most", len(c.name), maxName)}
	}
	if refused := c.checkTimes(); refused != nil {
		return c, refused
	}
	if p := t.refused([]candidate{c}); p != nil {
		return c, c.refusal(p)
	}
	a := netip.MustParseAddr(c.Spec.Address)
	for _, other := range t.accepted {
		switch {
		case netip.MustParseAddr(other.Spec.Address) == a:
			return c, &refusal{ReasonAddressTaken, fmt.Sprintf("spec.address: is %s, as of the older GatewayRouter %s: "+
				"remove one of them or change it", a, other.name)}
		case other.name == c.name:
			return c, &refusal{ReasonInvalid, "metadata.name: appears twice"}
		case other.Spec.Interface != c.Spec.Interface:
			return c, &refusal{ReasonInterfaceDiffers, fmt.Sprintf("spec.interface: is %s, but that of the older "+
				"GatewayRouter %s is %s: reach all routers of a Gateway by one interface, or use one Gateway for each",
				c.Spec.Interface, other.name, other.Spec.Interface)}
		case c.staticBFD() != nil && other.staticBFD() != nil && *c.staticBFD() != *other.staticBFD():
			return c, &refusal{ReasonInvalid, fmt.Sprintf("spec.static.bfd: differs from that of the older GatewayRouter %s: "+
				"BIRD has one for all static routers of an interface, write the same", other.name)}
		}
	}
	return c, nil
}

// staticBFD returns the BFD configuration of a static router, or nil.
func (c *candidate) staticBFD() *bfd {
	if c.Spec.Protocol == protocolStatic {
		return c.Spec.Static.BFD
	}
	return nil
}

// checkTimes refuses invalid durations, and rounds the valid ones as Meridio 2 does. It works on a
// copy, and does not modify the objects.
func (c *candidate) checkTimes() (refused *refusal) {
	if c.Spec.Protocol == protocolStatic {
		s := *c.Spec.Static
		c.Spec.Static = &s
		s.BFD, refused = s.BFD.rounded("spec.static.bfd.")
		return refused
	}
	s := *c.Spec.BGP
	c.Spec.BGP = &s
	hold, err := time.ParseDuration(cmp.Or(s.HoldTime, defaultHoldTime))
	if err != nil {
		return notTime("spec.bgp.holdTime", s.HoldTime)
	}
	s.HoldTime = fmt.Sprintf("%ds", hold/time.Second)
	s.BFD, refused = s.BFD.rounded("spec.bgp.bfd.")
	return refused
}

// rounded returns a copy of b, which may be nil, with rounded times.
func (b *bfd) rounded(path string) (*bfd, *refusal) {
	if b == nil {
		return nil, nil
	}
	x := *b
	for i, text := range []*string{&x.MinRx, &x.MinTx} {
		d, err := time.ParseDuration(*text)
		if err != nil {
			return nil, notTime(path+[]string{"minRx", "minTx"}[i], *text)
		}
		*text = d.Round(time.Millisecond).String()
	}
	return &x, nil
}

func notTime(path, text string) *refusal {
	return &refusal{ReasonInvalid, fmt.Sprintf("%s: is %q: write a duration such as 300ms or 90s", path, text)}
}

// refused returns the first problem that the reader of the trench file reports for a file with the
// given gateways, or nil.
func (t *translator) refused(gateways []candidate) *trench.Problem {
	_, err := trench.Parse("", t.file(gateways), trench.DefaultDefaults())
	var refused *trench.Errors
	switch {
	case err == nil:
		return nil
	case errors.As(err, &refused) && len(refused.Problems) > 0:
		return &refused.Problems[0]
	}
	return &trench.Problem{Field: "attractor", Message: err.Error()}
}

// gatewayPath formats a problem with the path of the field in the Gateway.
func gatewayPath(p *trench.Problem) string {
	field := p.Field
	switch {
	case field == "trench", field == "attractor.name":
		field = "metadata.name"
	case strings.HasPrefix(field, "attractor.vips"):
		field = "status.addresses"
	}
	return field + ": " + p.Message
}

// refusal converts a problem of a file whose only gateway is the candidate, with the path of the
// field in the GatewayRouter.
func (c *candidate) refusal(p *trench.Problem) *refusal {
	field, of := strings.CutPrefix(p.Field, "attractor.gateways[0].")
	if !of {
		return &refusal{ReasonInvalid, strings.Replace(p.Field, "attractor.", "spec.", 1) + ": " + p.Message}
	}
	switch field {
	case "name":
		return &refusal{ReasonInvalid, "metadata.name: " + p.Message}
	case "address":
		return &refusal{ReasonInvalidAddress, "spec.address: " + p.Message}
	case "localASN", "remoteASN":
		return &refusal{ReasonInvalidASN, "spec.bgp." + field + ": " + p.Message}
	}
	return &refusal{ReasonInvalid, "spec." + strings.ToLower(c.Spec.Protocol) + "." + field + ": " + p.Message}
}

// file returns the trench file with the given gateways.
func (t *translator) file(gateways []candidate) []byte {
	name := quote(t.gateway.GetName())
	b := fmt.Appendf(nil, "# Translated from Gateway %s: changes are overwritten.\ntrench: %s\nattractor:\n  name: %s\n",
		quote(t.gateway.GetNamespace()+"/"+t.gateway.GetName()), name, name)
	b = append(b, "  vips: ["...)
	for i, v := range t.vips {
		if i > 0 {
			b = append(b, ", "...)
		}
		b = append(b, quote(v.String())...)
	}
	b = append(b, "]\n"...)
	if len(gateways) == 0 {
		return append(b, "streams: []\n"...)
	}
	b = fmt.Appendf(b, "  interface: %s\n  gateways:\n", quote(gateways[0].Spec.Interface))
	for _, g := range gateways {
		b = fmt.Appendf(b, "    - {name: %s, address: %s, ", quote(g.name), quote(g.Spec.Address))
		guard := g.staticBFD()
		if s := g.Spec.BGP; g.Spec.Protocol == protocolBGP {
			b = fmt.Appendf(b, "localASN: %d, remoteASN: %d, localPort: %d, remotePort: %d, holdTime: %s",
				s.LocalASN, s.RemoteASN, port(s.LocalPort), port(s.RemotePort), s.HoldTime)
			guard = s.BFD
		} else {
			b = append(b, "protocol: static"...)
		}
		if guard != nil {
			b = fmt.Appendf(b, ", bfd: {minTx: %s, minRx: %s, multiplier: %d}", guard.MinTx, guard.MinRx, guard.Multiplier)
		}
		b = append(b, "}\n"...)
	}
	return append(b, "streams: []\n"...)
}

func port(p *int64) int64 {
	if p == nil {
		return defaultPort
	}
	return *p
}

// quote returns a quoted YAML scalar. The escapes of Go are valid in YAML.
func quote(s string) string { return strconv.QuoteToASCII(s) }
