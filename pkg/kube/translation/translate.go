package translation

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
	"github.com/vipgate/vipgate/pkg/trench"
	trenchfile "github.com/vipgate/vipgate/pkg/trench/file"
	"github.com/vipgate/vipgate/pkg/vip"
)

type translator struct {
	settings *settings
	defaults trench.Stream // spec.defaults
	pods     map[label][]*endpoint
	slices   map[label][]*discoveryv1.EndpointSlice
	streams  []*trench.Stream
	policies map[string]trench.Policy // of Services, by stream
	limits   [2]amounts               // of each namespace other than the Trench's, and of all
	used     map[string]amounts       // of each, and of all as ""
	lent     map[string]int           // checks a second of each that are beyond the limits
}

// Translate returns the trench file of a Trench and its Services. It is pure: the result depends
// only on its arguments, and not on the order of the objects.
func Translate(objects Objects, options Options) Result {
	object := objects.Trench
	result := Result{Trench: Verdict{Object: corev1.ObjectReference{
		APIVersion: v1alpha1.Kind.GroupVersion().String(), Kind: v1alpha1.Kind.Kind,
	}}}
	if object == nil {
		result.Trench.Reason, result.Trench.Message = ReasonNotFound, "the Trench does not exist: create it"
		return result
	}
	result.Trench.Object.Namespace, result.Trench.Object.Name = object.GetNamespace(), object.GetName()
	result.Trench.Object.UID, result.Trench.Generation = object.GetUID(), object.GetGeneration()
	if err := result.translate(objects, options); err != nil {
		result.Trench.Reason, result.Trench.Message = ReasonInvalid, message("%v", err)
		result.File, result.Config, result.Keys, result.Services, result.Holders = nil, nil, nil, nil, nil
		return result
	}
	result.Trench.Accepted, result.Trench.Reason, result.Trench.Message = true, ReasonValid, "the trench file is valid"
	return result
}

// translate sets the fields of the result. It returns the reason why the Trench is refused.
func (result *Result) translate(objects Objects, options Options) error {
	decoded, err := v1alpha1.FromUnstructured(objects.Trench)
	if err != nil {
		return err
	}
	settings, err := newSettings(decoded, objects, options.KeyDir)
	if err != nil {
		return err
	}
	state := &translator{settings: settings, policies: map[string]trench.Policy{}}
	if err := state.readDefaults(); err != nil {
		return err
	}
	// A Service selects its Trench by spec.loadBalancerClass.
	class := v1alpha1.LoadBalancerClass(decoded.Name)
	var services []*corev1.Service
	for _, service := range objects.Services {
		if named := service.Spec.LoadBalancerClass; service.Spec.Type == corev1.ServiceTypeLoadBalancer &&
			named != nil && *named == class &&
			service.DeletionTimestamp == nil && slices.Contains(settings.namespaces, service.Namespace) {
			services = append(services, service)
		}
	}
	// The oldest Service has the first claim to a VIP that no Service held before.
	slices.SortFunc(services, Older)
	state.readPods(objects.Pods, services)
	state.slices = readSlices(objects.EndpointSlices)
	candidates := state.candidates(services)
	for fits := false; !fits; {
		// Again for each Service that shrink lets fall back.
		state.share(candidates)
		result.Config, result.File, err = state.file(candidates)
		var size tooLarge
		fits = !errors.As(err, &size) || !state.shrink(candidates, int(size)-trenchfile.MaxSize)
	}
	for _, named := range candidates[:len(services)] { // without absent ones
		result.Services = append(result.Services, state.verdict(named))
	}
	result.Holders = state.holders(candidates)
	slices.SortFunc(result.Services, func(a, b ServiceVerdict) int {
		service, y := a.Object, b.Object
		return cmp.Or(cmp.Compare(service.Namespace, y.Namespace), cmp.Compare(service.Name, y.Name),
			cmp.Compare(service.UID, y.UID))
	})
	result.Keys, result.Trench.Problems = settings.keys, settings.problems
	return err
}

// list formats the first VIPs of a list, separated by commas.
func list(vips []vip.VIP) string {
	const enough = 10
	texts := vip.Texts(vips[:min(len(vips), enough)])
	if more := len(vips) - enough; more > 0 {
		texts = append(texts, fmt.Sprintf("%d more", more))
	}
	return strings.Join(texts, ", ")
}

func reference(service *corev1.Service) corev1.ObjectReference {
	return corev1.ObjectReference{
		APIVersion: "v1", Kind: "Service", Namespace: service.Namespace,
		Name: service.Name, UID: service.UID,
	}
}

// tooLarge is the size of a trench file that its readers refuse.
type tooLarge int

func (size tooLarge) Error() string {
	return fmt.Sprintf("the trench file has %d bytes, more than the %d that are read: "+
		"divide the Services among several Trenches", int(size), trenchfile.MaxSize)
}

// file limits the streams to the quotas, and returns the configuration and the content of the
// trench file, or why it is refused.
func (state *translator) file(candidates []*candidate) (*trench.Config, []byte, error) {
	state.streams = nil
	for _, candidate := range candidates {
		if candidate.stream != nil {
			state.limit(candidate)
			state.streams = append(state.streams, candidate.stream)
		}
	}
	slices.SortFunc(state.streams, func(a, b *trench.Stream) int { return strings.Compare(a.Name, b.Name) })
	config := *state.settings.config
	config.Streams = slices.Clone(config.Streams)
	config.Attractor.Policies = slices.Clone(config.Attractor.Policies)
	for _, stream := range state.streams {
		config.Streams = append(config.Streams, *stream)
		if policy, ok := state.policies[stream.Name]; ok {
			policy.VIPs = stream.VIPs
			config.Attractor.Policies = append(config.Attractor.Policies, policy)
		}
	}
	if problems := trench.Validate(config.Complete(trench.DefaultDefaults())); len(problems) > 0 {
		return nil, nil, errors.New(joined(problems, state.path))
	}
	file := File(state.settings.trench.Namespace, &config)
	if len(file) > trenchfile.MaxSize {
		return nil, nil, tooLarge(len(file))
	}
	return &config, file, nil
}

// File returns the trench file of a configuration. Its comment names the Trench.
func File(namespace string, config *trench.Config) []byte {
	// fileName replaces characters that would end the comment.
	file := fmt.Appendf(nil, "# Translated from Trench %s/%s: changes are overwritten.\n",
		fileName(namespace), fileName(config.Trench))
	return append(file, trenchfile.Marshal(config)...)
}

// joined returns the first problems, each with the path of its origin.
func joined(problems []trench.Problem, path func(field string) string) string {
	const enough = 3
	var texts []string
	for _, problem := range problems[:min(len(problems), enough)] {
		texts = append(texts, path(problem.Path)+": "+problem.Message(path))
	}
	if more := len(problems) - enough; more > 0 {
		texts = append(texts, fmt.Sprintf("%d more problems", more))
	}
	return strings.Join(texts, "; ")
}

// path returns the field of the Trench, or the stream of a Service, that a value comes from.
func (state *translator) path(field string) string {
	own := len(state.settings.config.Streams)
	if position, rest, ok := trench.Item(field, "streams"); ok && position >= own {
		return strings.TrimSuffix("stream "+state.streams[position-own].Name+"."+rest, ".")
	}
	return specPath(field)
}

// specPath returns the field of the Trench for a field of the trench file.
func specPath(field string) string {
	switch field {
	case "":
		return "spec"
	case "trench":
		return "metadata.name"
	}
	return "spec." + field
}
