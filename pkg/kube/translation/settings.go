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
	holders    holderList         // of the status
	names      map[string]bool    // names of the streams
	keys       map[string][]byte
	unreadable map[string]string // as in Objects
	problems   []Problem
}

// newSettings returns the settings, or the reason why the Trench is refused.
func newSettings(source *v1alpha1.Trench, objects Objects, keyDir string) (*settings, error) {
	result := &settings{
		trench: source, namespaces: source.Namespaces(), held: map[vip.VIP]string{}, names: map[string]bool{},
		keys: map[string][]byte{}, holders: readHolders(source.Status.Holders), unreadable: objects.Unreadable,
	}
	if err := result.readNetwork(); err != nil {
		return nil, err
	}
	for _, name := range slices.Sorted(maps.Keys(objects.Unreadable)) {
		result.problems = append(result.problems, result.problem(ReasonUnreadable,
			"%s: let a Role there allow get, list and watch", objects.Unreadable[name]))
	}
	result.readSubnets()
	result.readPublish()
	// A gateway has a Secret where the trench file has a path, so it is replaced before the file's
	// reader checks all fields.
	attractor, err := result.readGateways(objects.Secrets, keyDir)
	if err != nil {
		return nil, err
	}
	object := map[string]any{"trench": source.Name, "attractor": attractor}
	if len(source.Spec.Streams) > 0 {
		object["streams"] = source.Spec.Streams
	}
	// The defaults of the frontend are not known here, and stay out of the file.
	config, problems := trenchfile.Object(object, trench.DefaultDefaults())
	if len(problems) > 0 {
		return nil, errors.New(joined(problems, specPath))
	}
	config.MaxRemoval = source.Spec.MaxRemoval
	result.config = config
	result.readConfirm()
	// Services ask for VIPs by address: the list is searched for each address of each Pod.
	result.vips = slices.SortedFunc(slices.Values(config.Attractor.VIPs), vip.Compare)
	for _, stream := range config.Streams {
		result.names[stream.Name] = true
		for _, served := range stream.VIPs {
			result.held[served] = stream.Name
		}
	}
	return result, nil
}

// readConfirm reads the annotation that confirms held removals. A malformed one confirms nothing.
func (settings *settings) readConfirm() {
	text := settings.trench.Annotations[v1alpha1.ConfirmAnnotation]
	if text == "" {
		return
	}
	var confirmed trench.Config
	problems := trenchfile.Decode(map[string]any{"confirm": text}, &confirmed)
	settings.config.Confirm = confirmed.Confirm
	if len(problems) > 0 {
		settings.config.Confirm = ""
		settings.problems = append(settings.problems, settings.problem(ReasonInvalidAnnotation, "%s",
			joined(problems, func(string) string { return "annotation " + v1alpha1.ConfirmAnnotation })))
	}
}

func (settings *settings) problem(reason, format string, args ...any) Problem {
	source := settings.trench
	return Problem{corev1.ObjectReference{
		APIVersion: v1alpha1.Kind.GroupVersion().String(), Kind: v1alpha1.Kind.Kind,
		Namespace: source.Namespace, Name: source.Name, UID: source.UID,
	}, reason, message(format, args...)}
}

// readPublish reports the invalid addresses of spec.publish. The valid ones are published.
func (settings *settings) readPublish() {
	if settings.trench.Spec.Publish == nil {
		return
	}
	for position, address := range settings.trench.Spec.Publish.Addresses {
		if !v1alpha1.PublishedAddress(address) {
			settings.problems = append(settings.problems, settings.problem(ReasonAddressNotPublished,
				"spec.publish.addresses[%d]: is %q, which is not published: write an IP address without "+
					"length and zone, or a host name in lower case", position, address))
		}
	}
}

func (settings *settings) readNetwork() error {
	network := settings.trench.Spec.Network
	if network == nil {
		return nil
	}
	namespace, name, _ := strings.Cut(network.Name, "/")
	if namespace == "" || name == "" || strings.Contains(name, "/") {
		return fmt.Errorf("spec.network.name: is %q: write NAMESPACE/NAME of the NetworkAttachmentDefinition", network.Name)
	}
	settings.network = network.Name
	for position, text := range network.Subnets {
		subnet, err := netip.ParsePrefix(text)
		if err != nil || subnet.Addr().Is4In6() || subnet != subnet.Masked() {
			return fmt.Errorf("spec.network.subnets[%d]: is %q: write a prefix such as 172.16.0.0/16 or fd00:16::/64",
				position, text)
		}
		settings.subnets = append(settings.subnets, subnet)
	}
	return nil
}

var (
	secretName = regexp.MustCompile(`^[a-z0-9][a-z0-9.-]{0,252}$`)
	secretKey  = regexp.MustCompile(`^[A-Za-z0-9._-]{1,253}$`)
)

// readGateways returns the attractor with passwordFile for passwordSecret, and reads the passwords.
func (settings *settings) readGateways(secrets []*corev1.Secret, keyDir string) (map[string]any, error) {
	attractor := settings.trench.Spec.Attractor
	list, ok := attractor["gateways"].([]any)
	if !ok {
		return attractor, nil
	}
	// The Trench is shared and must not be modified.
	list = slices.Clone(list)
	for position, item := range list {
		gateway, _ := item.(map[string]any)
		field := fmt.Sprintf("spec.attractor.gateways[%d]", position)
		if _, ok := gateway["passwordFile"]; ok {
			return nil, fmt.Errorf("%s.passwordFile: write passwordSecret with the name and the key of a Secret", field)
		}
		reference, ok := gateway["passwordSecret"]
		if !ok {
			continue
		}
		secret, _ := reference.(map[string]any)
		name, _ := secret["name"].(string)
		key, _ := secret["key"].(string)
		// Both names become parts of a file name.
		if !secretName.MatchString(name) || !secretKey.MatchString(key) || len(secret) != 2 {
			return nil, fmt.Errorf("%s.passwordSecret: write the name and the key of a Secret, "+
				"such as {name: gw-1, key: password}", field)
		}
		// The name of a Secret contains no underscore, so two keys never share a file.
		file := shortened(name+"_"+key, maxFileName)
		gateway = maps.Clone(gateway)
		delete(gateway, "passwordSecret")
		gateway["passwordFile"] = path.Join(keyDir, file)
		list[position] = gateway
		settings.readPassword(secrets, name, key, file)
	}
	attractor = maps.Clone(attractor)
	attractor["gateways"] = list
	return attractor, nil
}

// maxFileName is the maximum length of a file name in Linux (NAME_MAX).
const maxFileName = 255

func (settings *settings) readPassword(secrets []*corev1.Secret, name, key, file string) {
	namespace := settings.trench.Namespace
	position := slices.IndexFunc(secrets,
		func(secret *corev1.Secret) bool { return secret.Namespace == namespace && secret.Name == name })
	if position >= 0 && len(secrets[position].Data[key]) > 0 {
		settings.keys[file] = secrets[position].Data[key]
		return
	}
	problem := Problem{
		Object:  corev1.ObjectReference{APIVersion: "v1", Kind: "Secret", Namespace: namespace, Name: name},
		Reason:  ReasonPasswordMissing,
		Message: fmt.Sprintf("Secret %s/%s does not exist: create it with the key %s", namespace, name, key),
	}
	if position >= 0 {
		problem.Object.UID = secrets[position].UID
		problem.Message = fmt.Sprintf("Secret %s/%s has no key %s, or an empty one: add it", namespace, name, key)
	}
	// Several gateways may refer to the same key.
	if !slices.Contains(settings.problems, problem) && settings.unreadable[namespace+"/"+name] == "" {
		settings.problems = append(settings.problems, problem)
	}
}

// readSubnets reports foreign namespaces without subnets. Only their targets are refused, so that
// the Trench keeps its own.
func (settings *settings) readSubnets() {
	if position := slices.IndexFunc(settings.namespaces, settings.unbounded); position >= 0 {
		settings.problems = append(settings.problems, settings.problem(ReasonSubnetsMissing, "spec.network.subnets: is "+
			"missing, so that targets of namespace %s, which could have any address, are refused: write the subnets of "+
			"network %s", settings.namespaces[position], settings.network))
	}
}

// unbounded reports whether the targets of a namespace could have any address of the network,
// although other users than those of the Trench may write them.
func (settings *settings) unbounded(namespace string) bool {
	return settings.network != "" && len(settings.subnets) == 0 && namespace != settings.trench.Namespace
}

// refuses returns why a target of a namespace cannot have an address; "" if it can.
func (settings *settings) refuses(namespace string, address netip.Addr) string {
	if address.Zone() != "" {
		return "has a zone: give it an address that needs none"
	}
	if what, _ := vip.NotHost(address); what != "" {
		return fmt.Sprintf("is %s: give it the address of one host", what)
	}
	if settings.unbounded(namespace) {
		return fmt.Sprintf("is not in the Trench's namespace: write spec.network.subnets of the Trench, "+
			"the subnets of network %s", settings.network)
	}
	if settings.network != "" && len(settings.subnets) > 0 &&
		!slices.ContainsFunc(settings.subnets, func(subnet netip.Prefix) bool { return subnet.Contains(address) }) {
		return fmt.Sprintf("lies in none of the subnets of network %s: give it an address of them, "+
			"or add a subnet to spec.network.subnets of the Trench", settings.network)
	}
	if what := vip.NotTarget(address, settings.subnets); what != "" {
		if settings.network == "" {
			return fmt.Sprintf("is %s: give it another one", what)
		}
		return fmt.Sprintf("is %s: give it another one, or add a subnet of such addresses to spec.network.subnets "+
			"of the Trench", what)
	}
	if slices.ContainsFunc(settings.config.Attractor.Gateways,
		func(gateway trench.Gateway) bool { return gateway.Address == address }) {
		return "belongs to a gateway: give it an address of its own"
	}
	if wide, ok := vip.Containing(settings.vips, address); ok {
		return fmt.Sprintf("lies in the VIP %s: give it an address of its own", wide)
	}
	return ""
}
