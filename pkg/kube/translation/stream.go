package translation

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
	"github.com/vipgate/vipgate/pkg/trench"
	trenchfile "github.com/vipgate/vipgate/pkg/trench/file"
	"github.com/vipgate/vipgate/pkg/vip"
)

type refusal struct{ reason, message string }

func refuse(reason, format string, args ...any) *refusal {
	return &refusal{reason, message(format, args...)}
}

// maxMessage is the maximum size of a message in bytes; the limit of an Event is 1024.
const maxMessage = 1000

// message formats a message and truncates it, because it may quote a long annotation.
func message(format string, args ...any) string {
	text := fmt.Sprintf(format, args...)
	if len(text) > maxMessage {
		text = strings.ToValidUTF8(text[:maxMessage-len("…")], "") + "…"
	}
	return text
}

// annotations maps fields of a stream to the annotation of a Service that sets them.
var annotations = map[string]string{
	"vips": v1alpha1.VIPsAnnotation, "check": v1alpha1.CheckAnnotation, "minReady": v1alpha1.MinReadyAnnotation,
	"drainTime": v1alpha1.DrainTimeAnnotation, "maglev": v1alpha1.MaglevAnnotation,
	"lastResort": v1alpha1.LastResortAnnotation, "policy": v1alpha1.PolicyAnnotation,
}

// newStream returns the stream of a Service without targets.
func (state *translator) newStream(service *corev1.Service) (*trench.Stream, *refusal) {
	for _, port := range service.Spec.Ports {
		if target := port.TargetPort.IntValue(); port.TargetPort.Type == intstr.Int && target != 0 &&
			target != int(port.Port) {
			return nil, refuse(ReasonPortTranslation, "port %d has the targetPort %d, and vipgate does not translate "+
				"ports: let the application listen on port %d, or set port and targetPort to %d", port.Port, target,
				port.Port, target)
		}
	}
	vips, refused := state.claim(service)
	if refused != nil {
		return nil, refused
	}
	// The annotations are read over the defaults, so a field without an annotation keeps its default.
	stream := state.defaults
	stream.Name, stream.VIPs = fileName(service.Namespace+"."+service.Name), vips
	if state.settings.names[stream.Name] {
		return nil, refuse(ReasonInvalid, "there is a stream %s already, such as in spec.streams of the Trench: "+
			"rename one of them", stream.Name)
	}
	if refused := readAnnotations(service, &stream); refused != nil {
		return nil, refused
	}
	if refused := readPorts(service, &stream); refused != nil {
		return nil, refused
	}
	if refused := state.readPolicy(service, &stream); refused != nil {
		return nil, refused
	}
	if refused := state.refuseCommunities(service, stream.Name); refused != nil {
		return nil, refused
	}
	// The Service alone is refused for its stream, so that it cannot break the trench file.
	complete := stream.Complete()
	if problems := trench.ValidateStream(&complete, state.settings.vips); len(problems) > 0 {
		return nil, refuse(ReasonInvalidAnnotation, "%s", joined(problems, origin))
	}
	return &stream, nil
}

// readAnnotations replaces the fields of a stream that annotations of its Service set.
func readAnnotations(service *corev1.Service, stream *trench.Stream) *refusal {
	fields := map[string]any{}
	for _, name := range []string{"check", "maglev"} {
		if object, refused := readObject(service, name); refused != nil {
			return refused
		} else if object != nil {
			fields[name] = object
		}
	}
	for _, name := range []string{"minReady", "drainTime", "lastResort"} {
		if text, ok := service.Annotations[annotations[name]]; ok {
			fields[name] = text
		}
	}
	if problems := trenchfile.Decode(fields, stream); len(problems) > 0 {
		return refuse(ReasonInvalidAnnotation, "%s", joined(problems, origin))
	}
	return refuseCheck(fields["check"], "")
}

// readObject returns the object in the annotation for a field; nil without the annotation.
func readObject(service *corev1.Service, field string) (map[string]any, *refusal) {
	text, ok := service.Annotations[annotations[field]]
	if !ok {
		return nil, nil
	}
	object, err := parseObject(text)
	if err != nil {
		return nil, refuse(ReasonInvalidAnnotation, "annotation %s: %v", annotations[field], err)
	}
	return object, nil
}

// readPolicy reads the policy of a Service. Its VIPs must have none in the Trench.
func (state *translator) readPolicy(service *corev1.Service, stream *trench.Stream) *refusal {
	object, refused := readObject(service, "policy")
	delete(state.policies, stream.Name) // of another form of the Service
	if object == nil {
		return refused
	}
	var read trench.Policy
	problems := trenchfile.Decode(object, &read)
	if len(problems) > 0 {
		return refuse(ReasonInvalidAnnotation, "%s",
			joined(problems, func(path string) string { return origin("policy." + path) }))
	}
	if len(read.VIPs) > 0 {
		return refuse(ReasonInvalidAnnotation, "annotation %s: vips: are those of the Service: remove the field",
			v1alpha1.PolicyAnnotation)
	}
	for _, policy := range state.settings.config.Attractor.Policies {
		for _, served := range stream.VIPs {
			if slices.Contains(policy.VIPs, served) {
				return refuse(ReasonInvalidAnnotation, "annotation %s: the Trench has a policy of VIP %s: remove one of them",
					v1alpha1.PolicyAnnotation, served)
			}
		}
	}
	state.policies[stream.Name] = read
	return nil
}

// readPorts sets the match of a stream, and the default of its check, from its Service's ports.
func readPorts(service *corev1.Service, stream *trench.Stream) *refusal {
	byProtocol := map[string][]uint16{}
	for _, port := range service.Spec.Ports {
		name := strings.ToLower(string(protocol(port.Protocol)))
		if port.Port < 1 || port.Port > math.MaxUint16 || !slices.Contains([]string{"tcp", "udp", "sctp"}, name) {
			return refuse(ReasonInvalid, "spec.ports: is %s port %d: write tcp, udp or sctp, and a port between 1 and 65535",
				name, port.Port)
		}
		// The first TCP port in the order of the Service is checked by default.
		if name == "tcp" && stream.Check.Kind() == "" {
			stream.Check.TCP.Port = uint16(port.Port)
		}
		byProtocol[name] = append(byProtocol[name], uint16(port.Port))
	}
	if stream.Check.Kind() == "" {
		return refuse(ReasonNoCheck, "there is no TCP port to check: write annotation %s, such as %s",
			v1alpha1.CheckAnnotation, suggestedCheck(service))
	}
	if count := len(service.Spec.Ports); count > trench.MaxMatch {
		return refuse(ReasonInvalid, "spec.ports has %d ports, and the data plane knows %d of a Service at most: "+
			"remove some", count, trench.MaxMatch)
	}
	for _, name := range slices.Sorted(maps.Keys(byProtocol)) {
		// A Service may have several named ports with one number.
		slices.Sort(byProtocol[name])
		stream.Match = append(stream.Match,
			trench.Match{Protocols: []string{name}, Ports: slices.Compact(byProtocol[name])})
	}
	return nil
}

// suggestedCheck returns a check of the first port of a Service.
func suggestedCheck(service *corev1.Service) string {
	port, name := 8080, "tcp"
	if len(service.Spec.Ports) > 0 {
		port, name = int(service.Spec.Ports[0].Port), strings.ToLower(string(protocol(service.Spec.Ports[0].Protocol)))
	}
	switch {
	case name == "udp" && port == 53:
		return `{"dns":{"port":53,"name":"example.org"}}`
	case name == "udp" && port == 123:
		return `{"ntp":{"port":123}}`
	case name == "udp":
		return fmt.Sprintf(`{"udp":{"port":%d,"send":"ping"}}`, port)
	}
	return fmt.Sprintf(`{%q:{"port":%d}}`, name, port)
}

// origin returns the part of a Service that sets a field of its stream.
func origin(path string) string {
	field, rest, _ := strings.Cut(path, ".")
	switch {
	case path == "":
		return "annotations"
	case rest == "":
		return "annotation " + annotations[field]
	}
	return "annotation " + annotations[field] + ": " + rest
}

// warnings returns the problems of a Service that have no effect on its traffic.
func warnings(service *corev1.Service) (all []Problem) {
	warn := func(reason, format string, args ...any) {
		all = append(all, Problem{reference(service), reason, message(format, args...)})
	}
	// Messages must be equal in every pod, so their lists are sorted.
	known := slices.Sorted(maps.Values(annotations))
	for _, name := range slices.Sorted(maps.Keys(service.Annotations)) {
		if strings.HasPrefix(name, v1alpha1.Group+"/") && !slices.Contains(known, name) {
			warn(ReasonUnknownAnnotation, "annotation %s is unknown and has no effect: remove it; those of a Service are %s",
				name, strings.Join(known, ", "))
		}
	}
	if affinity := service.Spec.SessionAffinity; affinity != "" && affinity != corev1.ServiceAffinityNone {
		warn(ReasonSessionAffinity, "spec.sessionAffinity is %s and has no effect: set it to None; a flow keeps its "+
			"target without it", affinity)
	}
	if len(service.Spec.LoadBalancerSourceRanges) > 0 {
		warn(ReasonSourceRanges, "spec.loadBalancerSourceRanges has no effect: remove it, and filter with a "+
			"NetworkPolicy or in the application")
	}
	return all
}

// claim returns the VIPs of a Service, sorted.
func (state *translator) claim(service *corev1.Service) ([]vip.VIP, *refusal) {
	vips, refused := parseVIPs(service)
	if refused != nil {
		return nil, refused
	}
	for i, claimed := range vips {
		if i > 0 && claimed == vips[i-1] {
			return nil, refuse(ReasonInvalidAnnotation, "annotation %s: VIP %s appears twice: remove one of them",
				v1alpha1.VIPsAnnotation, claimed)
		}
		if refused := state.lacks(claimed); refused != nil {
			return nil, refused
		}
	}
	return vips, nil
}

// parseVIPs returns the VIPs in the annotation of a Service, sorted.
func parseVIPs(service *corev1.Service) ([]vip.VIP, *refusal) {
	text := strings.TrimSpace(service.Annotations[v1alpha1.VIPsAnnotation])
	if text == "" {
		return nil, refuse(ReasonNoVIPs, "annotation %s is missing: write the VIPs of the Service, separated by commas, "+
			"such as 20.0.0.1,2000::1", v1alpha1.VIPsAnnotation)
	}
	var vips []vip.VIP
	for item := range strings.SplitSeq(text, ",") {
		item = strings.TrimSpace(item)
		// A VIP without a prefix length is a single address.
		if address, err := netip.ParseAddr(item); err == nil {
			item = netip.PrefixFrom(address.WithZone(""), address.BitLen()).String()
		}
		parsed, err := vip.Parse(item)
		if err != nil {
			return nil, refuse(ReasonInvalidAnnotation, "annotation %s: %v", v1alpha1.VIPsAnnotation, err)
		}
		vips = append(vips, parsed)
	}
	slices.SortFunc(vips, vip.Compare)
	return vips, nil
}

// lacks returns why no Service may have a VIP, or nil if the VIP is available.
func (state *translator) lacks(wanted vip.VIP) *refusal {
	if _, ok := slices.BinarySearchFunc(state.settings.vips, wanted, vip.Compare); !ok {
		if wider, ok := vip.Containing(state.settings.vips, wanted.Prefix().Addr()); ok {
			return refuse(ReasonVIPNotAllowed, "VIP %s is not one of the Trench, which has %s: "+
				"claim that, or let spec.attractor.vips list %s instead", wanted, wider, wanted)
		}
		return refuse(ReasonVIPNotAllowed, "VIP %s is not one of the Trench: "+
			"choose one of spec.attractor.vips, or add it there", wanted)
	}
	if name, ok := state.settings.held[wanted]; ok {
		return refuse(ReasonVIPHeld, "stream %s of the Trench has VIP %s: choose another one", name, wanted)
	}
	return nil
}

// protocol returns the protocol of a port; the default is TCP.
func protocol(name corev1.Protocol) corev1.Protocol { return cmp.Or(name, corev1.ProtocolTCP) }

func parseObject(text string) (map[string]any, error) {
	decoder := json.NewDecoder(strings.NewReader(text))
	// Keep the text of numbers, which the reader of the trench file parses.
	decoder.UseNumber()
	var object map[string]any
	err := decoder.Decode(&object)
	if err == nil && object == nil {
		err = errors.New("it is null")
	}
	if err == nil {
		// Decode stops after the first value.
		if _, more := decoder.Token(); !errors.Is(more, io.EOF) {
			err = errors.New("something follows it")
		}
	}
	if err != nil {
		return nil, fmt.Errorf(`is not an object of JSON (%s): write one such as {"http":{"port":8080}}`, problemOf(err))
	}
	return object, nil
}

// problemOf returns the text of a JSON error without Go types.
func problemOf(err error) string {
	if wrong := (*json.UnmarshalTypeError)(nil); errors.As(err, &wrong) {
		return "unexpected " + wrong.Value
	}
	return err.Error()
}

func (state *translator) readDefaults() error {
	defaults := state.settings.trench.Spec.Defaults
	for _, name := range slices.Sorted(maps.Keys(defaults)) {
		if _, ok := annotations[name]; !ok || name == "vips" {
			return fmt.Errorf("spec.defaults.%s: unknown field: write minReady, check, drainTime, lastResort or maglev", name)
		}
	}
	problems := trenchfile.Decode(defaults, &state.defaults)
	if len(problems) == 0 {
		stream := state.defaults
		if stream.Check != (trench.Check{}) && stream.Check.Kind() == "" {
			stream.Check.TCP.Port = 1 // a Service may set the kind
		}
		stream = stream.Complete()
		problems = slices.DeleteFunc(trench.ValidateStream(&stream, state.settings.vips),
			func(problem trench.Problem) bool { return problem.Path == "name" || problem.Path == "vips" })
	}
	if len(problems) > 0 {
		return errors.New(joined(problems, func(field string) string { return "spec.defaults." + field }))
	}
	return nil
}
