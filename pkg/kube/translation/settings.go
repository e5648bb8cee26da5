package translation

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"path"
	"regexp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
	"github.com/vipgate/vipgate/pkg/trench"
	trenchfile "github.com/vipgate/vipgate/pkg/trench/file"
	"github.com/vipgate/vipgate/pkg/vip"
)

// settings holds the configuration of a Trench that its Services depend on.
type settings struct {
	trench     *v1alpha1.Trench
	namespaces []string
	network    string // NAMESPACE/NAME; "" for the pod network
	subnets    []netip.Prefix
	config     *trench.Config     // of the Trench alone, without defaults
	vips       []vip.VIP          // VIPs of the attractor, sorted
	held       map[vip.VIP]string // name of the Trench's stream that has the VIP
	names      map[string]bool    // names of the streams
	keys       map[string][]byte
	problems   []Problem
}

// newSettings returns the settings, or the reason why the Trench is refused.
func newSettings(t *v1alpha1.Trench, secrets []*corev1.Secret, keyDir string) (*settings, error) {
	s := &settings{
		trench: t, namespaces: t.Spec.Namespaces, held: map[vip.VIP]string{}, names: map[string]bool{},
		keys: map[string][]byte{},
	}
	if len(s.namespaces) == 0 {
		s.namespaces = []string{t.Namespace}
	}
	if err := s.readNetwork(); err != nil {
		return nil, err
	}
	s.readPublish()
	attractor, err := s.readGateways(secrets, keyDir)
	if err != nil {
		return nil, err
	}
	object := map[string]any{"trench": t.Name, "attractor": attractor}
	if len(t.Spec.Streams) > 0 {
		object["streams"] = t.Spec.Streams
	}
	config, problems := trenchfile.Object(object, trench.DefaultDefaults())
	if len(problems) > 0 {
		return nil, errors.New(joined(problems, specPath))
	}
	s.config = config
	s.vips = slices.SortedFunc(slices.Values(config.Attractor.VIPs), vip.Compare)
	for _, stream := range config.Streams {
		s.names[stream.Name] = true
		for _, v := range stream.VIPs {
			s.held[v] = stream.Name
		}
	}
	return s, nil
}

// readPublish reports the invalid addresses of spec.publish. The valid ones are published.
func (s *settings) readPublish() {
	if s.trench.Spec.Publish == nil {
		return
	}
	for i, a := range s.trench.Spec.Publish.Addresses {
		if !v1alpha1.PublishedAddress(a) {
			s.problems = append(s.problems, Problem{
				Object: corev1.ObjectReference{
					APIVersion: v1alpha1.Kind.GroupVersion().String(), Kind: v1alpha1.Kind.Kind,
					Namespace: s.trench.Namespace, Name: s.trench.Name, UID: s.trench.UID,
				},
				Reason: ReasonAddressNotPublished,
				Message: message("spec.publish.addresses[%d]: is %q, which is not published: write an IP address without "+
					"length and zone, or a host name in lower case", i, a),
			})
		}
	}
}

func (s *settings) readNetwork() error {
	n := s.trench.Spec.Network
	if n == nil {
		return nil
	}
	namespace, name, _ := strings.Cut(n.Name, "/")
	if namespace == "" || name == "" || strings.Contains(name, "/") {
		return fmt.Errorf("spec.network.name: is %q: write NAMESPACE/NAME of the NetworkAttachmentDefinition", n.Name)
	}
	s.network = n.Name
	for i, text := range n.Subnets {
		p, err := netip.ParsePrefix(text)
		if err != nil || p.Addr().Is4In6() || p != p.Masked() {
			return fmt.Errorf("spec.network.subnets[%d]: is %q: write a prefix such as 172.16.0.0/16 or fd00:16::/64", i, text)
		}
		s.subnets = append(s.subnets, p)
	}
	return nil
}

var (
	secretName = regexp.MustCompile(`^[a-z0-9][a-z0-9.-]{0,252}$`)
	secretKey  = regexp.MustCompile(`^[A-Za-z0-9._-]{1,253}$`)
)

// readGateways returns the attractor with passwordFile instead of passwordSecret, and reads the
// passwords.
func (s *settings) readGateways(secrets []*corev1.Secret, keyDir string) (map[string]any, error) {
	attractor := s.trench.Spec.Attractor
	list, ok := attractor["gateways"].([]any)
	if !ok {
		return attractor, nil
	}
	list = slices.Clone(list)
	for i, x := range list {
		gateway, _ := x.(map[string]any)
		field := fmt.Sprintf("spec.attractor.gateways[%d]", i)
		if _, ok := gateway["passwordFile"]; ok {
			return nil, fmt.Errorf("%s.passwordFile: write passwordSecret with the name and the key of a Secret", field)
		}
		reference, ok := gateway["passwordSecret"]
		if !ok {
			continue
		}
		m, _ := reference.(map[string]any)
		name, _ := m["name"].(string)
		key, _ := m["key"].(string)
		if !secretName.MatchString(name) || !secretKey.MatchString(key) || len(m) != 2 {
			return nil, fmt.Errorf("%s.passwordSecret: write the name and the key of a Secret, "+
				"such as {name: gw-1, key: password}", field)
		}
		// The name of a Secret contains no underscore, so two keys never share a file.
		file := shortened(name+"_"+key, maxFileName)
		gateway = maps.Clone(gateway)
		delete(gateway, "passwordSecret")
		gateway["passwordFile"] = path.Join(keyDir, file)
		list[i] = gateway
		s.readPassword(secrets, name, key, file)
	}
	attractor = maps.Clone(attractor)
	attractor["gateways"] = list
	return attractor, nil
}

// maxFileName is the maximum length of a file name in Linux (NAME_MAX).
const maxFileName = 255

func (s *settings) readPassword(secrets []*corev1.Secret, name, key, file string) {
	namespace := s.trench.Namespace
	i := slices.IndexFunc(secrets, func(x *corev1.Secret) bool { return x.Namespace == namespace && x.Name == name })
	if i >= 0 && len(secrets[i].Data[key]) > 0 {
		s.keys[file] = secrets[i].Data[key]
		return
	}
	problem := Problem{
		Object:  corev1.ObjectReference{APIVersion: "v1", Kind: "Secret", Namespace: namespace, Name: name},
		Reason:  ReasonPasswordMissing,
		Message: fmt.Sprintf("Secret %s/%s does not exist: create it with the key %s", namespace, name, key),
	}
	if i >= 0 {
		problem.Object.UID = secrets[i].UID
		problem.Message = fmt.Sprintf("Secret %s/%s has no key %s, or an empty one: add it", namespace, name, key)
	}
	if !slices.Contains(s.problems, problem) {
		s.problems = append(s.problems, problem)
	}
}

// refuses returns why a target cannot have an address; "" if it can.
func (s *settings) refuses(a netip.Addr) string {
	if a.Zone() != "" {
		return "has a zone: give it an address that needs none"
	}
	if what, _ := vip.NotHost(a); what != "" {
		return fmt.Sprintf("is %s: give it the address of one host", what)
	}
	if s.network != "" && len(s.subnets) > 0 &&
		!slices.ContainsFunc(s.subnets, func(p netip.Prefix) bool { return p.Contains(a) }) {
		return fmt.Sprintf("lies in none of the subnets of network %s: give it an address of them, "+
			"or add a subnet to spec.network.subnets of the Trench", s.network)
	}
	if v, ok := vip.Containing(s.vips, a); ok {
		return fmt.Sprintf("lies in the VIP %s: give it an address of its own", v)
	}
	return ""
}
