package translation

import (
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/vipgate/vipgate/pkg/vip"
)

// Objects are what a translation depends on. They are not changed.
type Objects struct {
	Trench         *unstructured.Unstructured // nil: it does not exist
	Services       []*corev1.Service          // of all classes
	EndpointSlices []*discoveryv1.EndpointSlice
	Pods           []*corev1.Pod
	Secrets        []*corev1.Secret
}

// Options of a translation.
type Options struct {
	// KeyDir is the absolute path of the directory with the password files of gateways.
	KeyDir string
}

// Result is the trench file, and what became of each object.
type Result struct {
	// File is the trench file; nil: the previous one stays in force.
	File []byte
	// Keys are the contents of the password files by name in the KeyDir; of no meaning without File.
	Keys map[string][]byte
	// Trench is the verdict on the Trench, Services those on Services of its class, by namespace and
	// name; there are none without File, since what they had stays in force.
	Trench   Verdict
	Services []ServiceVerdict
}

// Verdict says whether an object is accepted.
type Verdict struct {
	// Object is the object's kind, namespace, name and UID; Generation the one that was read.
	Object     corev1.ObjectReference
	Generation int64
	Accepted   bool
	// Reason is one word in CamelCase, Message explains it; for what is refused, with the remedy.
	Reason, Message string
	// Problems are what is refused in an object that is accepted otherwise.
	Problems []Problem
}

// Problem is a part of an object that is refused, or an object that belongs to it.
type Problem struct {
	Object          corev1.ObjectReference
	Reason, Message string
}

// ServiceVerdict is the verdict on a Service. What follows it is zero for one that serves nothing: a
// refused one keeps the stream that was accepted last.
type ServiceVerdict struct {
	Verdict
	Stream  string // name in the trench file
	VIPs    []vip.VIP
	Targets int // without those that are terminating
}
