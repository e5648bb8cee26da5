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
func (objects *Objects) Read(reader io.Reader) error { return ReadEach(reader, objects.add) }

// ReadEach calls add for each object of YAML documents or of JSON, including the items of lists.
func ReadEach(reader io.Reader, add func(object unstructured.Unstructured) error) error {
	documents := yaml.NewYAMLOrJSONDecoder(reader, 4096)
	for number := 1; ; number++ {
		var object unstructured.Unstructured
		err := documents.Decode(&object.Object)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil {
			err = addItems(object, add)
		}
		if err != nil {
			return fmt.Errorf("read object %d: %w", number, err)
		}
	}
}

func addItems(list unstructured.Unstructured, add func(list unstructured.Unstructured) error) error {
	items, ok := list.Object["items"].([]any)
	if !ok || !strings.HasSuffix(list.GetKind(), "List") {
		return add(list)
	}
	for position, item := range items {
		object, ok := item.(map[string]any)
		if !ok {
			return fmt.Errorf("item %d is no object", position+1)
		}
		if err := addItems(unstructured.Unstructured{Object: object}, add); err != nil {
			return fmt.Errorf("item %d: %w", position+1, err)
		}
	}
	return nil
}

func (objects *Objects) add(object unstructured.Unstructured) error {
	switch object.GroupVersionKind() {
	case v1alpha1.Kind:
		if objects.Trench != nil {
			return fmt.Errorf("a second Trench %s/%s, besides %s/%s: pass only one",
				object.GetNamespace(), object.GetName(), objects.Trench.GetNamespace(), objects.Trench.GetName())
		}
		objects.Trench = &object
		return nil
	case corev1.SchemeGroupVersion.WithKind("Service"):
		return convert(object, &objects.Services)
	case corev1.SchemeGroupVersion.WithKind("Pod"):
		return convert(object, &objects.Pods)
	case discoveryv1.SchemeGroupVersion.WithKind("EndpointSlice"):
		return convert(object, &objects.EndpointSlices)
	case corev1.SchemeGroupVersion.WithKind("Secret"):
		if err := convert(object, &objects.Secrets); err != nil {
			return err
		}
		secret := objects.Secrets[len(objects.Secrets)-1]
		// The API server moves stringData to data; an object of a command line still has it.
		for key, value := range secret.StringData {
			if secret.Data == nil {
				secret.Data = map[string][]byte{}
			}
			secret.Data[key] = []byte(value)
		}
	}
	return nil
}

func convert[T any](object unstructured.Unstructured, list *[]*T) error {
	converted := new(T)
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(object.Object, converted); err != nil {
		return fmt.Errorf("%s %s/%s: %w", object.GetKind(), object.GetNamespace(), object.GetName(), err)
	}
	*list = append(*list, converted)
	return nil
}
