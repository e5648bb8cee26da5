package translation

import (
	"cmp"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// maxFileSize is the size limit of the trench file's reader.
const maxFileSize = 8 << 20

// translator holds the state of one translation.
type translator struct {
	settings *settings
	defaults map[string]any // spec.defaults, by field of a stream
	known    map[string]readFields
	pods     map[label][]*endpoint
	slices   map[label][]*discoveryv1.EndpointSlice
	streams  []*stream
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
	t := &translator{settings: s, known: map[string]readFields{}}
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
	slices.SortFunc(services, older)
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
	slices.SortFunc(t.streams, func(a, b *stream) int { return strings.Compare(a.name, b.name) })
	r.File, r.Keys, r.Trench.Problems = t.file(), s.keys, s.problems
	return t.refused(r.File)
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

// file returns the content of the trench file.
func (t *translator) file() []byte {
	meta := t.settings.trench.ObjectMeta
	b := fmt.Appendf(nil, "# Translated from Trench %s/%s: changes are overwritten.\n",
		fileName(meta.Namespace), fileName(meta.Name))
	b = append(appendText(append(b, "trench: "...), meta.Name), "\nattractor:"...)
	b = appendObject(b, "  ", t.settings.attractor)
	if len(t.settings.trench.Spec.Streams)+len(t.streams) == 0 {
		return append(b, "streams: []\n"...)
	}
	b = append(b, "streams:\n"...)
	for _, x := range t.settings.trench.Spec.Streams {
		m, ok := x.(map[string]any)
		if !ok || len(m) == 0 {
			b = append(appendValue(append(b, "  - "...), x), '\n')
			continue
		}
		b = appendFields(append(b, "  - "...), "    ", m)
	}
	for _, s := range t.streams {
		b = appendTargets(s.append(b), s.targets)
	}
	return b
}

// appendObject writes the value of a field: an object with one field a line.
func appendObject(b []byte, indent string, m map[string]any) []byte {
	if len(m) == 0 {
		return append(b, " {}\n"...)
	}
	return appendFields(append(append(b, '\n'), indent...), indent, m)
}

// refused returns the errors of the trench file's reader, with paths in the Trench.
func (t *translator) refused(file []byte) error {
	if len(file) > maxFileSize {
		return fmt.Errorf("the trench file has %d bytes, more than the %d that are read: "+
			"divide the Services among several Trenches", len(file), maxFileSize)
	}
	_, err := trench.Parse("", file, trench.DefaultDefaults())
	var refused *trench.Errors
	if !errors.As(err, &refused) {
		return err
	}
	return errors.New(joined(refused, t.path))
}

// linesOfFile matches line numbers in messages of the reader, which have no meaning to the user.
var linesOfFile = regexp.MustCompile(`, first in line \d+| of line \d+`)

// joined returns the first problems of a file, each with the path of its origin.
func joined(refused *trench.Errors, path func(field string) string) string {
	const enough = 3
	var texts []string
	for _, p := range refused.Problems[:min(len(refused.Problems), enough)] {
		texts = append(texts, path(p.Field)+": "+linesOfFile.ReplaceAllString(p.Message, ""))
	}
	if more := len(refused.Problems) - enough; more > 0 {
		texts = append(texts, fmt.Sprintf("%d more problems", more))
	}
	return strings.Join(texts, "; ")
}

// path returns the field of the Trench, or the stream, that a field of the trench file comes from.
func (t *translator) path(field string) string {
	switch {
	case field == "":
		return "spec"
	case field == "trench":
		return "metadata.name"
	}
	number, rest, ok := strings.Cut(strings.TrimPrefix(field, "streams["), "]")
	if i, err := strconv.Atoi(number); ok && err == nil {
		if i -= len(t.settings.trench.Spec.Streams); i >= 0 && i < len(t.streams) {
			return "stream " + t.streams[i].name + rest
		}
	}
	return "spec." + field
}
