package translation

import (
	"errors"
	"fmt"
	"io"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/yaml"

	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
)

// Read adds the objects of YAML documents or of JSON, including the lists that kubectl prints. It
// ignores kinds that the translation does not use. The error names the object that cannot be
// read, or a second Trench.
func (o *Objects) Read(r io.Reader) error { return ReadEach(r, o.add) }

// ReadEach calls add for each object of YAML documents or of JSON, including the items of lists.
func ReadEach(r io.Reader, add func(u unstructured.Unstructured) error) error {
	documents := yaml.NewYAMLOrJSONDecoder(r, 4096)
	for n := 1; ; n++ {
		var u unstructured.Unstructured
		err := documents.Decode(&u.Object)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil {
			err = addItems(u, add)
		}
		if err != nil {
			return fmt.Errorf("read object %d: %w", n, err)
		}
	}
}

func addItems(u unstructured.Unstructured, add func(u unstructured.Unstructured) error) error {
	items, ok := u.Object["items"].([]any)
	if !ok || !strings.HasSuffix(u.GetKind(), "List") {
		return add(u)
	}
	for i, item := range items {
		object, ok := item.(map[string]any)
		if !ok {
			return fmt.Errorf("item %d is no object", i+1)
		}
		if err := addItems(unstructured.Unstructured{Object: object}, add); err != nil {
			return fmt.Errorf("item %d: %w", i+1, err)
		}
	}
	return nil
}

func (o *Objects) add(u unstructured.Unstructured) error {
	switch u.GroupVersionKind() {
	case v1alpha1.Kind:
		if o.Trench != nil {
			return fmt.Errorf("a second Trench %s/%s, besides %s/%s: pass only one",
				u.GetNamespace(), u.GetName(), o.Trench.GetNamespace(), o.Trench.GetName())
		}
		o.Trench = &u
		return nil
	case corev1.SchemeGroupVersion.WithKind("Service"):
		return convert(u, &o.Services)
	case corev1.SchemeGroupVersion.WithKind("Pod"):
		return convert(u, &o.Pods)
	case discoveryv1.SchemeGroupVersion.WithKind("EndpointSlice"):
		return convert(u, &o.EndpointSlices)
	case corev1.SchemeGroupVersion.WithKind("Secret"):
		if err := convert(u, &o.Secrets); err != nil {
			return err
		}
		s := o.Secrets[len(o.Secrets)-1]
		for key, value := range s.StringData {
			if s.Data == nil {
				s.Data = map[string][]byte{}
			}
			s.Data[key] = []byte(value)
		}
	}
	return nil
}

func convert[T any](u unstructured.Unstructured, to *[]*T) error {
	x := new(T)
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, x); err != nil {
		return fmt.Errorf("%s %s/%s: %w", u.GetKind(), u.GetNamespace(), u.GetName(), err)
	}
	*to = append(*to, x)
	return nil
}
