package meridio2

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/vipgate/vipgate/pkg/kube/translation"
	"github.com/vipgate/vipgate/pkg/trench"
	trenchfile "github.com/vipgate/vipgate/pkg/trench/file"
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
	r.File = append(fmt.Appendf(nil, "# Translated from Gateway %q: changes are overwritten.\n",
		o.Gateway.GetNamespace()+"/"+o.Gateway.GetName()), trenchfile.Marshal(&t.config)...)
	r.Services = t.verdicts
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
	config   trench.Config         // of the accepted GatewayRouters
	problems []translation.Problem // problems of the Gateway
	verdicts []translation.ServiceVerdict
}

// refusal is why a GatewayRouter is refused.
type refusal struct{ reason, message string }

func refuse(reason, format string, args ...any) *refusal {
	return &refusal{reason, fmt.Sprintf(format, args...)}
}

// translate sets the verdicts on all objects. It returns the reason why the Gateway is refused.
func (t *translator) translate(routers []*unstructured.Unstructured) error {
	t.config.Trench, t.config.Attractor.Name = t.gateway.GetName(), t.gateway.GetName()
	if err := t.readVIPs(); err != nil {
		return err
	}
	// Validate the Gateway without GatewayRouters first, so that each later problem belongs to one
	// GatewayRouter.
	if problems := trench.Validate(&t.config); len(problems) > 0 {
		return errors.New(gatewayPath(problems[0].Path) + ": " + problems[0].Message(gatewayPath))
	}
	routers = slices.Clone(routers)
	slices.SortFunc(routers, translation.Older) // of two conflicting ones the older is accepted
	for _, u := range routers {
		if !refersTo(u, t.gateway) || u.GetDeletionTimestamp() != nil {
			continue
		}
		v := translation.ServiceVerdict{Verdict: translation.Verdict{Object: reference(u), Generation: u.GetGeneration()}}
		if refused := t.accept(u); refused == nil {
			v.Accepted, v.Reason = true, ReasonAccepted
			v.Message = fmt.Sprintf("is gateway %s of interface %s", u.GetName(), t.config.Attractor.Interface)
		} else {
			v.Reason, v.Message = refused.reason, refused.message
		}
		t.verdicts = append(t.verdicts, v)
	}
	slices.SortFunc(t.config.Attractor.Gateways, func(a, b trench.Gateway) int { return cmp.Compare(a.Name, b.Name) })
	slices.SortFunc(t.verdicts, func(a, b translation.ServiceVerdict) int {
		return cmp.Or(cmp.Compare(a.Object.Name, b.Object.Name), cmp.Compare(a.Object.UID, b.Object.UID))
	})
	return nil
}

// readVIPs reads the addresses of the Gateway's status. An invalid VIP is reported as a problem.
func (t *translator) readVIPs() error {
	var g gateway
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(t.gateway.Object, &g); err != nil {
		return fmt.Errorf("failed to decode the Gateway: %w", err)
	}
	seen, vips := map[string]bool{}, []vip.VIP{}
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
		vips = append(vips, v)
	}
	slices.SortFunc(vips, vip.Compare)
	t.config.Attractor.VIPs = slices.Compact(vips)
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

// accept adds a GatewayRouter to the configuration, unless the result would be invalid.
func (t *translator) accept(u *unstructured.Unstructured) *refusal {
	var r router
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, &r); err != nil {
		return refuse(ReasonInvalid, "failed to decode the GatewayRouter: %v", err)
	}
	switch {
	case r.Spec.Protocol != protocolBGP && r.Spec.Protocol != protocolStatic:
		return refuse(ReasonInvalid, "spec.protocol: is %q: write BGP or Static", r.Spec.Protocol)
	case r.Spec.Protocol == protocolBGP && r.Spec.BGP == nil:
		return refuse(ReasonInvalid, "spec.bgp: is missing: write remoteASN and localASN")
	case r.Spec.Protocol == protocolStatic && r.Spec.Static == nil:
		return refuse(ReasonInvalid, "spec.static: is missing: write static: {} or its bfd")
	case r.Spec.Interface == "":
		return refuse(ReasonInvalid, "spec.interface: is missing: write the name of an interface")
	case len(u.GetName()) > maxName:
		return refuse(ReasonNameTooLong, "metadata.name: has %d characters: create the GatewayRouter with a name of %d at most",
			len(u.GetName()), maxName)
	}
	gateway, refused := r.gateway(u.GetName())
	if refused != nil {
		return refused
	}
	config := t.config
	older := config.Attractor.Gateways
	config.Attractor.Gateways = append(slices.Clip(older), gateway)
	config.Attractor.Interface = r.Spec.Interface
	if problems := trench.Validate(&config); len(problems) > 0 {
		return r.refusal(problems[0], older)
	}
	if is := t.config.Attractor.Interface; len(older) > 0 && is != r.Spec.Interface {
		return refuse(ReasonInterfaceDiffers, "spec.interface: is %s, but that of the older GatewayRouter %s is %s: reach "+
			"all routers of a Gateway by one interface, or use one Gateway for each", r.Spec.Interface, older[0].Name, is)
	}
	t.config = config
	return nil
}

// gateway converts a GatewayRouter. Times are rounded as Meridio 2 does.
func (r *router) gateway(name string) (gateway trench.Gateway, refused *refusal) {
	gateway.Name = name
	address, err := netip.ParseAddr(r.Spec.Address)
	if err != nil && r.Spec.Address != "" {
		return gateway, refuse(ReasonInvalidAddress, "spec.address: is %s, not an IP address: write one such as 172.16.1.1",
			trench.Quote(r.Spec.Address))
	}
	gateway.Address = address
	if r.Spec.Protocol == protocolStatic {
		gateway.Protocol = trench.Static
		gateway.BFD, refused = r.Spec.Static.BFD.convert("spec.static.bfd.")
		return gateway, refused
	}
	session := r.Spec.BGP
	hold, refused := duration("spec.bgp.holdTime", cmp.Or(session.HoldTime, defaultHoldTime))
	if refused != nil {
		return gateway, refused
	}
	gateway.LocalASN, gateway.RemoteASN = session.LocalASN, session.RemoteASN
	gateway.LocalPort, gateway.RemotePort = port(session.LocalPort), port(session.RemotePort)
	gateway.HoldTime = hold.Truncate(time.Second)
	gateway.BFD, refused = session.BFD.convert("spec.bgp.bfd.")
	return gateway, refused
}

// convert returns the parameters of BFD, or nil without BFD.
func (b *bfd) convert(path string) (*trench.BFD, *refusal) {
	if b == nil {
		return nil, nil
	}
	minRx, refused := duration(path+"minRx", b.MinRx)
	if refused != nil {
		return nil, refused
	}
	minTx, refused := duration(path+"minTx", b.MinTx)
	return &trench.BFD{
		MinTx: minTx.Round(time.Millisecond), MinRx: minRx.Round(time.Millisecond), Multiplier: int(b.Multiplier),
	}, refused
}

func duration(path, text string) (time.Duration, *refusal) {
	d, err := time.ParseDuration(text)
	if err != nil {
		return 0, refuse(ReasonInvalid, "%s: is %q: write a duration such as 300ms or 90s", path, text)
	}
	return d, nil
}

func port(p *int64) int {
	if p == nil {
		return defaultPort
	}
	return int(*p)
}

// gatewayPath returns the field of the Gateway for a field of the trench file.
func gatewayPath(field string) string {
	switch {
	case field == "trench", field == "attractor.name":
		return "metadata.name"
	case strings.HasPrefix(field, "attractor.vips"):
		return "status.addresses"
	}
	return field
}

// refusal converts a problem of the GatewayRouter, which may conflict with older ones.
func (r *router) refusal(p trench.Problem, older []trench.Gateway) *refusal {
	message := p.Message(func(path string) string {
		i, _, _ := trench.Item(path, "attractor.gateways")
		return "the older GatewayRouter " + older[i].Name
	})
	_, field, own := trench.Item(p.Path, "attractor.gateways")
	switch {
	case !own:
		return refuse(ReasonInvalid, "spec.%s: %s", strings.TrimPrefix(p.Path, "attractor."), message)
	case field == "name":
		return refuse(ReasonInvalid, "metadata.name: %s", message)
	case field == "address" && p.Related != "":
		return refuse(ReasonAddressTaken, "spec.address: %s", message)
	case field == "address":
		return refuse(ReasonInvalidAddress, "spec.address: %s", message)
	case field == "localASN", field == "remoteASN":
		return refuse(ReasonInvalidASN, "spec.bgp.%s: %s", field, message)
	}
	return refuse(ReasonInvalid, "spec.%s.%s: %s", strings.ToLower(r.Spec.Protocol), field, message)
}
