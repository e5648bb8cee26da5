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
// verdict on the Gateway; Result.Services lists the verdicts on the GatewayRouters, sorted by name.
func Translate(objects Objects) translation.Result {
	result := translation.Result{Trench: translation.Verdict{Object: corev1.ObjectReference{
		APIVersion: gatewayVersion.String(), Kind: gatewayKind.Kind,
	}}}
	if objects.Gateway == nil {
		result.Trench.Reason, result.Trench.Message = ReasonNotFound, "the Gateway does not exist: create it"
		return result
	}
	result.Trench = translation.Verdict{Object: reference(objects.Gateway), Generation: objects.Gateway.GetGeneration()}
	if objects.Gateway.GetDeletionTimestamp() != nil {
		result.Trench.Reason, result.Trench.Message = ReasonDeleting,
			"the Gateway is being deleted: create it again to change it"
		return result
	}
	state := translator{gateway: objects.Gateway}
	if err := state.translate(objects.Routers); err != nil {
		result.Trench.Reason, result.Trench.Message = ReasonInvalid, err.Error()
		return result
	}
	result.File = append(fmt.Appendf(nil, "# Translated from Gateway %q: changes are overwritten.\n",
		objects.Gateway.GetNamespace()+"/"+objects.Gateway.GetName()), trenchfile.Marshal(&state.config)...)
	result.Services = state.verdicts
	result.Trench.Accepted, result.Trench.Reason, result.Trench.Problems = true, ReasonValid, state.problems
	result.Trench.Message = "the trench file is written"
	return result
}

func reference(object *unstructured.Unstructured) corev1.ObjectReference {
	return corev1.ObjectReference{
		APIVersion: object.GetAPIVersion(), Kind: object.GetKind(), Namespace: object.GetNamespace(),
		Name: object.GetName(), UID: object.GetUID(),
	}
}

type translator struct {
	gateway  *unstructured.Unstructured
	config   trench.Config         // of the accepted GatewayRouters
	problems []translation.Problem // problems of the Gateway
	verdicts []translation.ServiceVerdict
}

type refusal struct{ reason, message string }

func refuse(reason, format string, args ...any) *refusal {
	return &refusal{reason, fmt.Sprintf(format, args...)}
}

// translate sets the verdicts on all objects. It returns the reason why the Gateway is refused.
func (state *translator) translate(routers []*unstructured.Unstructured) error {
	state.config.Trench, state.config.Attractor.Name = state.gateway.GetName(), state.gateway.GetName()
	if err := state.readVIPs(); err != nil {
		return err
	}
	// Validate the Gateway without GatewayRouters first: each later problem is one GatewayRouter's.
	if problems := validate(state.config); len(problems) > 0 {
		return errors.New(gatewayPath(problems[0].Path) + ": " + problems[0].Message(gatewayPath))
	}
	routers = slices.Clone(routers)
	slices.SortFunc(routers, translation.Older) // of two conflicting ones the older is accepted
	for _, object := range routers {
		if !refersTo(object, state.gateway) || object.GetDeletionTimestamp() != nil {
			continue
		}
		verdict := translation.ServiceVerdict{}
		verdict.Object, verdict.Generation = reference(object), object.GetGeneration()
		if refused := state.accept(object); refused == nil {
			verdict.Accepted, verdict.Reason = true, ReasonAccepted
			verdict.Message = fmt.Sprintf("is gateway %s of interface %s", object.GetName(), state.config.Attractor.Interface)
		} else {
			verdict.Reason, verdict.Message = refused.reason, refused.message
		}
		state.verdicts = append(state.verdicts, verdict)
	}
	slices.SortFunc(state.config.Attractor.Gateways, func(a, b trench.Gateway) int { return cmp.Compare(a.Name, b.Name) })
	slices.SortFunc(state.verdicts, func(a, b translation.ServiceVerdict) int {
		return cmp.Or(cmp.Compare(a.Object.Name, b.Object.Name), cmp.Compare(a.Object.UID, b.Object.UID))
	})
	return nil
}

// validate returns the problems of a configuration that leaves MaxRemoval out.
func validate(config trench.Config) []trench.Problem {
	config.MaxRemoval = 100 // any valid value
	return trench.Validate(&config)
}

// readVIPs reads the addresses of the Gateway's status. An invalid VIP is reported as a problem.
func (state *translator) readVIPs() error {
	var gateway gateway
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(state.gateway.Object, &gateway); err != nil {
		return fmt.Errorf("failed to decode the Gateway: %w", err)
	}
	seen, vips := map[string]bool{}, []vip.VIP{}
	for _, address := range gateway.Status.Addresses {
		// The default type is IPAddress. Meridio 2 ignores any other type, too.
		if address.Type != nil && *address.Type != "IPAddress" || seen[address.Value] {
			continue
		}
		seen[address.Value] = true
		parsed, err := readVIP(address.Value)
		if err != nil {
			state.problems = append(state.problems, translation.Problem{
				Object: reference(state.gateway), Reason: ReasonInvalidAddress,
				Message: fmt.Sprintf("status.addresses: %v; change destinationCIDRs of the L34Route that has it", err),
			})
			continue
		}
		vips = append(vips, parsed)
	}
	slices.SortFunc(vips, vip.Compare)
	// Several texts of one IPv6 address are one VIP.
	state.config.Attractor.VIPs = slices.Compact(vips)
	slices.SortFunc(state.problems, func(a, b translation.Problem) int { return cmp.Compare(a.Message, b.Message) })
	return nil
}

func readVIP(address string) (vip.VIP, error) {
	parsed, err := netip.ParseAddr(address)
	if err != nil || parsed.Zone() != "" {
		return vip.VIP{}, fmt.Errorf("%q is not the address of a VIP", address)
	}
	return vip.FromPrefix(netip.PrefixFrom(parsed, parsed.BitLen()))
}

// accept adds a GatewayRouter to the configuration, unless the result would be invalid.
func (state *translator) accept(object *unstructured.Unstructured) *refusal {
	var router router
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(object.Object, &router); err != nil {
		return refuse(ReasonInvalid, "failed to decode the GatewayRouter: %v", err)
	}
	switch {
	case router.Spec.Protocol != protocolBGP && router.Spec.Protocol != protocolStatic:
		return refuse(ReasonInvalid, "spec.protocol: is %q: write BGP or Static", router.Spec.Protocol)
	case router.Spec.Protocol == protocolBGP && router.Spec.BGP == nil:
		return refuse(ReasonInvalid, "spec.bgp: is missing: write remoteASN and localASN")
	case router.Spec.Protocol == protocolStatic && router.Spec.Static == nil:
		return refuse(ReasonInvalid, "spec.static: is missing: write static: {} or its bfd")
	case router.Spec.Interface == "":
		return refuse(ReasonInvalid, "spec.interface: is missing: write the name of an interface")
	case len(object.GetName()) > maxName:
		return refuse(ReasonNameTooLong,
			"metadata.name: has %d characters: create the GatewayRouter with a name of %d at most",
			len(object.GetName()), maxName)
	}
	// The CustomResourceDefinition refuses these, too; an object of a command line has not passed it.
	gateway, refused := router.gateway(object.GetName())
	if refused != nil {
		return refused
	}
	// The older GatewayRouters are valid, so the first problem is this one's, alone or in a conflict.
	config := state.config
	older := config.Attractor.Gateways
	// A refused gateway must not be written into the array of the accepted ones.
	config.Attractor.Gateways = append(slices.Clip(older), gateway)
	config.Attractor.Interface = router.Spec.Interface
	if problems := validate(config); len(problems) > 0 {
		return router.refusal(problems[0], older)
	}
	if common := state.config.Attractor.Interface; len(older) > 0 && common != router.Spec.Interface {
		return refuse(ReasonInterfaceDiffers, "spec.interface: is %s, but that of the older GatewayRouter %s is %s: reach "+
			"all routers of a Gateway by one interface, or use one Gateway for each", router.Spec.Interface,
			older[0].Name, common)
	}
	state.config = config
	return nil
}

// gateway converts a GatewayRouter. Times are rounded as Meridio 2 does.
func (router *router) gateway(name string) (gateway trench.Gateway, refused *refusal) {
	gateway.Name = name
	address, err := netip.ParseAddr(router.Spec.Address)
	switch {
	case router.Spec.Address == "": // the trench file has gateways without an address
		return gateway, refuse(ReasonInvalidAddress, "spec.address: is empty: write an IP address such as 172.16.1.1")
	case err != nil:
		return gateway, refuse(ReasonInvalidAddress, "spec.address: is %s, not an IP address: write one such as 172.16.1.1",
			trench.Quote(router.Spec.Address))
	}
	gateway.Address = address
	if router.Spec.Protocol == protocolStatic {
		gateway.Protocol = trench.Static
		gateway.BFD, refused = router.Spec.Static.BFD.convert("spec.static.bfd.")
		return gateway, refused
	}
	session := router.Spec.BGP
	hold, refused := duration("spec.bgp.holdTime", cmp.Or(session.HoldTime, defaultHoldTime))
	if refused != nil {
		return gateway, refused
	}
	gateway.LocalASN, gateway.RemoteASN = session.LocalASN, session.RemoteASN
	gateway.LocalPort, gateway.RemotePort = port(session.LocalPort), port(session.RemotePort)
	// Meridio 2 sends whole seconds to BIRD: it cuts off the rest.
	gateway.HoldTime = hold.Truncate(time.Second)
	gateway.BFD, refused = session.BFD.convert("spec.bgp.bfd.")
	return gateway, refused
}

// convert returns the parameters of BFD, or nil without BFD.
func (bfd *bfd) convert(path string) (*trench.BFD, *refusal) {
	if bfd == nil {
		return nil, nil
	}
	minRx, refused := duration(path+"minRx", bfd.MinRx)
	if refused != nil {
		return nil, refused
	}
	minTx, refused := duration(path+"minTx", bfd.MinTx)
	return &trench.BFD{
		MinTx: minTx.Round(time.Millisecond), MinRx: minRx.Round(time.Millisecond), Multiplier: int(bfd.Multiplier),
	}, refused
}

func duration(path, text string) (time.Duration, *refusal) {
	parsed, err := time.ParseDuration(text)
	if err != nil {
		return 0, refuse(ReasonInvalid, "%s: is %q: write a duration such as 300ms or 90s", path, text)
	}
	return parsed, nil
}

func port(number *int64) int {
	if number == nil {
		return defaultPort
	}
	return int(*number)
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
func (router *router) refusal(problem trench.Problem, older []trench.Gateway) *refusal {
	message := problem.Message(func(path string) string {
		position, _, _ := trench.Item(path, "attractor.gateways")
		return "the older GatewayRouter " + older[position].Name
	})
	_, field, own := trench.Item(problem.Path, "attractor.gateways")
	switch {
	case !own:
		return refuse(ReasonInvalid, "spec.%s: %s", strings.TrimPrefix(problem.Path, "attractor."), message)
	case field == "name":
		return refuse(ReasonInvalid, "metadata.name: %s", message)
	case field == "address" && problem.Related != "":
		return refuse(ReasonAddressTaken, "spec.address: %s", message)
	case field == "address":
		return refuse(ReasonInvalidAddress, "spec.address: %s", message)
	case field == "localASN", field == "remoteASN":
		return refuse(ReasonInvalidASN, "spec.bgp.%s: %s", field, message)
	}
	return refuse(ReasonInvalid, "spec.%s.%s: %s", strings.ToLower(router.Spec.Protocol), field, message)
}
