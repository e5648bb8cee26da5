package translation

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// stream is the stream of a Service.
type stream struct {
	name     string
	vips     []vip.VIP
	fields   []byte          // lines between the VIPs and the targets in the file
	families trench.Families // families that the check covers
	targets  []target
}

// refusal is why a Service is refused.
type refusal struct{ reason, message string }

func refuse(reason, format string, args ...any) *refusal {
	return &refusal{reason, message(format, args...)}
}

// maxMessage is the maximum size of a message in bytes; the limit of an Event is 1024.
const maxMessage = 1000

// message formats a message and truncates it, because it may quote a long annotation.
func message(format string, args ...any) string {
	s := fmt.Sprintf(format, args...)
	if len(s) > maxMessage {
		s = strings.ToValidUTF8(s[:maxMessage-len("…")], "") + "…"
	}
	return s
}

// annotations maps fields of a stream to the annotation of a Service that sets them.
var annotations = map[string]string{
	"vips": v1alpha1.VIPsAnnotation, "check": v1alpha1.CheckAnnotation, "minReady": v1alpha1.MinReadyAnnotation,
	"drainTime": v1alpha1.DrainTimeAnnotation, "maglev": v1alpha1.MaglevAnnotation,
}

// newStream returns the stream of a Service without targets.
func (t *translator) newStream(s *corev1.Service) (*stream, *refusal) {
	for _, p := range s.Spec.Ports {
		if n := p.TargetPort.IntValue(); p.TargetPort.Type == intstr.Int && n != 0 && n != int(p.Port) {
			return nil, refuse(ReasonPortTranslation, "port %d has the targetPort %d, and vipgate does not translate "+
				"ports: let the application listen on port %d, or set port and targetPort to %d", p.Port, n, p.Port, n)
		}
	}
	vips, refused := t.claim(s)
	if refused != nil {
		return nil, refused
	}
	fields, refused := t.fields(s)
	if refused != nil {
		return nil, refused
	}
	result := &stream{name: fileName(s.Namespace + "." + s.Name), vips: vips, fields: fields}
	if t.settings.names[result.name] {
		return nil, refuse(ReasonInvalid, "there is a stream %s already, such as in spec.streams of the Trench: "+
			"rename one of them", result.name)
	}
	read := t.read(fields)
	if read.problems != nil {
		reason := ReasonInvalidAnnotation
		if strings.HasPrefix(read.problems.Problems[0].Field, "match") {
			reason = ReasonInvalid
		}
		return nil, refuse(reason, "%s", joined(read.problems, origin))
	}
	result.families = read.families
	return result, nil
}

// origin returns the part of a Service that sets a field of its stream.
func origin(path string) string {
	field, rest, _ := strings.Cut(path, ".")
	switch {
	case path == "":
		return "annotations"
	case strings.HasPrefix(path, "match"):
		return "spec.ports"
	case rest == "":
		return "annotation " + annotations[field]
	}
	return "annotation " + annotations[field] + ": " + rest
}

// warnings returns the problems of a Service that have no effect on its traffic.
func warnings(s *corev1.Service) (all []Problem) {
	warn := func(reason, format string, args ...any) {
		all = append(all, Problem{reference(s), reason, message(format, args...)})
	}
	known := slices.Sorted(maps.Values(annotations))
	for _, name := range slices.Sorted(maps.Keys(s.Annotations)) {
		if strings.HasPrefix(name, v1alpha1.Group+"/") && !slices.Contains(known, name) {
			warn(ReasonUnknownAnnotation, "annotation %s is unknown and has no effect: remove it; those of a Service are %s",
				name, strings.Join(known, ", "))
		}
	}
	if a := s.Spec.SessionAffinity; a != "" && a != corev1.ServiceAffinityNone {
		warn(ReasonSessionAffinity, "spec.sessionAffinity is %s and has no effect: set it to None; a flow keeps its "+
			"target without it", a)
	}
	if len(s.Spec.LoadBalancerSourceRanges) > 0 {
		warn(ReasonSourceRanges, "spec.loadBalancerSourceRanges has no effect: remove it, and filter with a "+
			"NetworkPolicy or in the application")
	}
	return all
}

// claim returns the VIPs of a Service, sorted.
func (t *translator) claim(s *corev1.Service) ([]vip.VIP, *refusal) {
	vips, refused := parseVIPs(s)
	if refused != nil {
		return nil, refused
	}
	for i, v := range vips {
		if i > 0 && v == vips[i-1] {
			return nil, refuse(ReasonInvalidAnnotation, "annotation %s: VIP %s appears twice: remove one of them",
				v1alpha1.VIPsAnnotation, v)
		}
		if refused := t.lacks(v); refused != nil {
			return nil, refused
		}
	}
	return vips, nil
}

// parseVIPs returns the VIPs in the annotation of a Service, sorted.
func parseVIPs(s *corev1.Service) ([]vip.VIP, *refusal) {
	text := strings.TrimSpace(s.Annotations[v1alpha1.VIPsAnnotation])
	if text == "" {
		return nil, refuse(ReasonNoVIPs, "annotation %s is missing: write the VIPs of the Service, separated by commas, "+
			"such as 20.0.0.1,2000::1", v1alpha1.VIPsAnnotation)
	}
	var vips []vip.VIP
	for item := range strings.SplitSeq(text, ",") {
		item = strings.TrimSpace(item)
		if a, err := netip.ParseAddr(item); err == nil {
			item = netip.PrefixFrom(a.WithZone(""), a.BitLen()).String()
		}
		v, err := vip.Parse(item)
		if err != nil {
			return nil, refuse(ReasonInvalidAnnotation, "annotation %s: %v", v1alpha1.VIPsAnnotation, err)
		}
		vips = append(vips, v)
	}
	slices.SortFunc(vips, vip.Compare)
	return vips, nil
}

// lacks returns why no Service may have a VIP, or nil if the VIP is available.
func (t *translator) lacks(v vip.VIP) *refusal {
	if _, ok := slices.BinarySearchFunc(t.settings.vips, v, vip.Compare); !ok {
		if wider, ok := t.settings.covering(v.Prefix().Addr()); ok {
			return refuse(ReasonVIPNotAllowed, "VIP %s is not one of the Trench, which has %s: "+
				"claim that, or let spec.attractor.vips list %s instead", v, wider, v)
		}
		return refuse(ReasonVIPNotAllowed, "VIP %s is not one of the Trench: "+
			"choose one of spec.attractor.vips, or add it there", v)
	}
	if name, ok := t.settings.held[v]; ok {
		return refuse(ReasonVIPHeld, "stream %s of the Trench has VIP %s: choose another one", name, v)
	}
	return nil
}

// fields returns the fields of the stream of a Service in the format of the trench file.
func (t *translator) fields(s *corev1.Service) ([]byte, *refusal) {
	m := maps.Clone(t.defaults)
	for _, name := range []string{"check", "maglev"} {
		text, ok := s.Annotations[annotations[name]]
		if !ok {
			continue
		}
		object, err := parseObject(text)
		if err != nil {
			return nil, refuse(ReasonInvalidAnnotation, "annotation %s: %v", annotations[name], err)
		}
		m[name] = merged(m[name], object)
	}
	for _, name := range []string{"minReady", "drainTime"} {
		if text, ok := s.Annotations[annotations[name]]; ok {
			m[name] = text
			if _, err := strconv.ParseUint(text, 10, 64); err == nil {
				m[name] = json.Number(text)
			}
		}
	}
	check, _ := m["check"].(map[string]any)
	if !hasKind(check) {
		i := slices.IndexFunc(s.Spec.Ports, func(p corev1.ServicePort) bool {
			return protocol(p.Protocol) == corev1.ProtocolTCP
		})
		if i < 0 {
			return nil, refuse(ReasonNoCheck, "there is no TCP port to check: write annotation %s, such as "+
				`{"tcp":{"port":8080}}`, v1alpha1.CheckAnnotation)
		}
		m["check"] = merged(check, map[string]any{"tcp": map[string]any{"port": s.Spec.Ports[i].Port}})
	}
	if n := len(s.Spec.Ports); n > trench.MaxMatch {
		return nil, refuse(ReasonInvalid, "spec.ports has %d ports, and the data plane knows %d of a Service at most: "+
			"remove some", n, trench.MaxMatch)
	} else if n > 0 {
		m["match"] = match(s.Spec.Ports)
	}
	return appendFields([]byte("    "), "    ", m), nil
}

// match returns the match entries that select the packets of a Service.
func match(ports []corev1.ServicePort) []any {
	byProtocol := map[string][]int32{}
	for _, p := range ports {
		name := strings.ToLower(string(protocol(p.Protocol)))
		if !slices.Contains(byProtocol[name], p.Port) {
			byProtocol[name] = append(byProtocol[name], p.Port)
		}
	}
	var entries []any
	for _, name := range slices.Sorted(maps.Keys(byProtocol)) {
		var numbers []any
		for _, n := range slices.Sorted(slices.Values(byProtocol[name])) {
			numbers = append(numbers, n)
		}
		entries = append(entries, map[string]any{"protocols": []any{name}, "ports": numbers})
	}
	return entries
}

// protocol returns the protocol of a port; the default is TCP.
func protocol(p corev1.Protocol) corev1.Protocol { return cmp.Or(p, corev1.ProtocolTCP) }

// checkKinds lists the fields of a check that exclude each other.
var checkKinds = []string{"tcp", "http", "grpc"}

func hasKind(check map[string]any) bool {
	return slices.ContainsFunc(checkKinds, func(kind string) bool { _, ok := check[kind]; return ok })
}

// merged returns the union of the fields. A field of over takes precedence, and a check kind of
// over replaces the check kind of defaults.
func merged(defaults any, over map[string]any) map[string]any {
	m, _ := defaults.(map[string]any)
	m = maps.Clone(m)
	if m == nil {
		m = map[string]any{}
	}
	if hasKind(over) {
		for _, kind := range checkKinds {
			delete(m, kind)
		}
	}
	maps.Copy(m, over)
	return m
}

// parseObject parses a JSON object.
func parseObject(text string) (map[string]any, error) {
	d := json.NewDecoder(strings.NewReader(text))
	d.UseNumber()
	var m map[string]any
	err := d.Decode(&m)
	if err == nil && m == nil {
		err = errors.New("it is null")
	}
	if err == nil {
		if _, more := d.Token(); !errors.Is(more, io.EOF) {
			err = errors.New("something follows it")
		}
	}
	if err != nil {
		return nil, fmt.Errorf(`is not an object of JSON (%s): write one such as {"http":{"port":8080}}`, problemOf(err))
	}
	return m, nil
}

// problemOf returns the text of a JSON error without Go types.
func problemOf(err error) string {
	if wrong := (*json.UnmarshalTypeError)(nil); errors.As(err, &wrong) {
		return "unexpected " + wrong.Value
	}
	return err.Error()
}

// readFields is the result of parsing the fields of a stream with the reader of the trench file.
type readFields struct {
	families trench.Families
	problems *trench.Errors // Field is relative to the stream; nil without problems
}

// probe is the start of a trench file to parse the fields of a stream. Its VIP is in the
// discard-only prefix (RFC 6666), which no host uses.
const probe = `trench: probe
attractor:
  name: probe
  vips: ["100::1/128"]
streams:
  - name: probe
    vips: ["100::1/128"]
`

// read parses the fields of a stream with the reader of the trench file. The result depends on the
// rest of the file only for source addresses in VIPs, which read compares itself.
func (t *translator) read(fields []byte) readFields {
	if known, ok := t.known[string(fields)]; ok {
		return known
	}
	var r readFields
	config, err := trench.Parse("", append([]byte(probe), fields...), trench.DefaultDefaults())
	if errors.As(err, &r.problems) {
		for i := range r.problems.Problems {
			p := &r.problems.Problems[i]
			p.Field = strings.TrimPrefix(strings.TrimPrefix(p.Field, "streams[0]"), ".")
		}
	} else {
		check := config.Streams[0].Check
		r.families = check.Families
		for _, a := range []netip.Addr{check.Source4, check.Source6} {
			if v, ok := t.settings.covering(a); a.IsValid() && ok {
				message := fmt.Sprintf("is %s, which lies in the VIP %s: write an address of the load balancer's own", a, v)
				r.problems = &trench.Errors{Problems: []trench.Problem{{Field: "check.source", Message: message}}}
			}
		}
	}
	t.known[string(fields)] = r
	return r
}

// readDefaults checks spec.defaults of the Trench.
func (t *translator) readDefaults() error {
	defaults := t.settings.trench.Spec.Defaults
	t.defaults = map[string]any{}
	for _, name := range slices.Sorted(maps.Keys(defaults)) {
		if _, ok := annotations[name]; !ok || name == "vips" {
			return fmt.Errorf("spec.defaults.%s: unknown field: the fields here are minReady, check, drainTime, maglev", name)
		}
		t.defaults[name] = defaults[name]
	}
	m := maps.Clone(t.defaults)
	if check, ok := m["check"].(map[string]any); ok && !hasKind(check) {
		m["check"] = merged(check, map[string]any{"tcp": map[string]any{"port": 1}})
	}
	if len(m) == 0 {
		return nil
	}
	if p := t.read(appendFields([]byte("    "), "    ", m)).problems; p != nil {
		return errors.New(joined(p, func(field string) string { return "spec.defaults." + field }))
	}
	return nil
}
