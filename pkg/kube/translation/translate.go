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

// translator holds the state of one translation.
type translator struct {
	settings *settings
	defaults trench.Stream // spec.defaults
	pods     map[label][]*endpoint
	slices   map[label][]*discoveryv1.EndpointSlice
	streams  []*trench.Stream
}

// Translate returns the trench file of a Trench and its Services. It is pure: the result depends
// only on its arguments, and not on the order of the objects.
func Translate(objects Objects, options Options) Result {
	u := objects.Trench
	r := Result{Trench: Verdict{Object: corev1.ObjectReference{
		APIVersion: v1alpha1.Kind.GroupVersion().String(), Kind: v1alpha1.Kind.Kind,
	}}}
	if u == nil {
		r.Trench.Reason, r.Trench.Message = ReasonNotFound, "the Trench does not exist: create it"
		return r
	}
	r.Trench.Object.Namespace, r.Trench.Object.Name = u.GetNamespace(), u.GetName()
	r.Trench.Object.UID, r.Trench.Generation = u.GetUID(), u.GetGeneration()
	if err := r.translate(objects, options); err != nil {
		r.Trench.Reason, r.Trench.Message = ReasonInvalid, message("%v", err)
		r.File, r.Keys, r.Services = nil, nil, nil
		return r
	}
	r.Trench.Accepted, r.Trench.Reason, r.Trench.Message = true, ReasonValid, "the trench file is valid"
	return r
}

// translate sets the fields of the result. It returns the reason why the Trench is refused.
func (r *Result) translate(objects Objects, options Options) error {
	decoded, err := v1alpha1.FromUnstructured(objects.Trench)
	if err != nil {
		return err
	}
	s, err := newSettings(decoded, objects.Secrets, options.KeyDir)
	if err != nil {
		return err
	}
	t := &translator{settings: s}
	if err := t.readDefaults(); err != nil {
		return err
	}
	class := v1alpha1.LoadBalancerClass(decoded.Name)
	var services []*corev1.Service
	for _, x := range objects.Services {
		if c := x.Spec.LoadBalancerClass; x.Spec.Type == corev1.ServiceTypeLoadBalancer && c != nil && *c == class &&
			x.DeletionTimestamp == nil && slices.Contains(s.namespaces, x.Namespace) {
			services = append(services, x)
		}
	}
	slices.SortFunc(services, Older)
	t.pods, t.slices = t.readPods(objects.Pods, services), readSlices(objects.EndpointSlices)
	candidates := t.candidates(services)
	t.share(candidates)
	for _, c := range candidates {
		r.Services = append(r.Services, t.verdict(c))
	}
	slices.SortFunc(r.Services, func(a, b ServiceVerdict) int {
		x, y := a.Object, b.Object
		return cmp.Or(cmp.Compare(x.Namespace, y.Namespace), cmp.Compare(x.Name, y.Name), cmp.Compare(x.UID, y.UID))
	})
	slices.SortFunc(t.streams, func(a, b *trench.Stream) int { return strings.Compare(a.Name, b.Name) })
	r.Keys, r.Trench.Problems = s.keys, s.problems
	r.File, err = t.file()
	return err
}

// list formats the first VIPs of a list, separated by commas.
func list(vips []vip.VIP) string {
	const enough = 10
	var texts []string
	for _, v := range vips[:min(len(vips), enough)] {
		texts = append(texts, v.String())
	}
	if more := len(vips) - enough; more > 0 {
		texts = append(texts, fmt.Sprintf("%d more", more))
	}
	return strings.Join(texts, ", ")
}

func reference(s *corev1.Service) corev1.ObjectReference {
	return corev1.ObjectReference{APIVersion: "v1", Kind: "Service", Namespace: s.Namespace, Name: s.Name, UID: s.UID}
}

// file returns the content of the trench file, or why it is refused.
func (t *translator) file() ([]byte, error) {
	config := *t.settings.config
	config.Streams = slices.Clone(config.Streams)
	for _, stream := range t.streams {
		config.Streams = append(config.Streams, *stream)
	}
	if problems := trench.Validate(config.Complete(trench.DefaultDefaults())); len(problems) > 0 {
		return nil, errors.New(joined(problems, t.path))
	}
	meta := t.settings.trench.ObjectMeta
	file := fmt.Appendf(nil, "# Translated from Trench %s/%s: changes are overwritten.\n",
		fileName(meta.Namespace), fileName(meta.Name))
	file = append(file, trenchfile.Marshal(&config)...)
	if len(file) > trenchfile.MaxSize {
		return nil, fmt.Errorf("the trench file has %d bytes, more than the %d that are read: "+
			"divide the Services among several Trenches", len(file), trenchfile.MaxSize)
	}
	return file, nil
}

// joined returns the first problems, each with the path of its origin.
func joined(problems []trench.Problem, path func(field string) string) string {
	const enough = 3
	var texts []string
	for _, p := range problems[:min(len(problems), enough)] {
		texts = append(texts, path(p.Path)+": "+p.Message(path))
	}
	if more := len(problems) - enough; more > 0 {
		texts = append(texts, fmt.Sprintf("%d more problems", more))
	}
	return strings.Join(texts, "; ")
}

// path returns the field of the Trench, or the stream of a Service, that a value comes from.
func (t *translator) path(field string) string {
	own := len(t.settings.config.Streams)
	if i, rest, ok := trench.Item(field, "streams"); ok && i >= own {
		return strings.TrimSuffix("stream "+t.streams[i-own].Name+"."+rest, ".")
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
