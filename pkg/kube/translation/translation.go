package translation

import (
	"fmt"
	"slices"
	"strings"
	"text/tabwriter"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Objects is the input of a translation, which does not modify it.
type Objects struct {
	Trench         *unstructured.Unstructured // nil if it does not exist
	Services       []*corev1.Service          // of all classes
	EndpointSlices []*discoveryv1.EndpointSlice
	Pods           []*corev1.Pod
	Secrets        []*corev1.Secret
	// Unreadable maps namespaces, and Secrets as NAMESPACE/NAME, that the API server refuses to the
	// cause. The fields above have their last content, or nothing.
	Unreadable map[string]string
}

// Options configure a translation.
type Options struct {
	// KeyDir is the absolute path of the directory with the password files of gateways.
	KeyDir string
}

// Result is the trench file, and the verdict on each object.
type Result struct {
	// File is the trench file. If nil, the previous file stays in force.
	File []byte
	// Config is the content of File without defaults; nil without File and for a Gateway of Meridio 2.
	Config *trench.Config
	// Keys maps names in KeyDir to the contents of the password files. It is valid only with File.
	Keys map[string][]byte
	// Trench is the verdict on the Trench. Services lists the verdicts on the Services of its class,
	// sorted by namespace and name; it is empty without File, because their streams stay in force.
	Trench   Verdict
	Services []ServiceVerdict
	// Holders is the list for the status of the Trench; nil without File, and never nil with it.
	Holders []v1alpha1.Holder
}

// Verdict is the result of the translation for one object.
type Verdict struct {
	// Object is the object's kind, namespace, name and UID, Generation its translated generation.
	Object     corev1.ObjectReference
	Generation int64
	Accepted   bool
	// Reason is one word in CamelCase. Message explains it, and includes the remedy for a refusal.
	Reason, Message string
	// Problems lists the refused parts of an accepted object.
	Problems []Problem
}

// Problem is a refused part of an object, or a refused object that belongs to it.
type Problem struct {
	Object          corev1.ObjectReference
	Reason, Message string
}

// ServiceVerdict is the verdict on a Service, and its stream. A refused Service keeps its last
// accepted stream; without a stream the remaining fields are zero.
type ServiceVerdict struct {
	Verdict
	Stream  string // name in the trench file
	VIPs    []vip.VIP
	Targets int      // without terminating targets
	Names   []string // of these targets, sorted
}

// Table returns the verdicts as a table with one line for each object and each problem.
func (result Result) Table() string {
	var table strings.Builder
	writer := tabwriter.NewWriter(&table, 0, 0, 2, ' ', 0)
	fmt.Fprintln(writer, "KIND\tNAME\tACCEPTED\tREASON\tMESSAGE")
	row := func(object corev1.ObjectReference, accepted bool, reason, message string) {
		name := strings.TrimPrefix(object.Namespace+"/"+object.Name, "/")
		fmt.Fprintf(writer, "%s\t%s\t%t\t%s\t%s\n", object.Kind, name, accepted, reason, strings.ReplaceAll(message,
			"\n", " "))
	}
	for _, judged := range result.Verdicts() {
		row(judged.Object, judged.Accepted, judged.Reason, judged.Message)
		for _, problem := range judged.Problems {
			row(problem.Object, problem.Warning(), problem.Reason, problem.Message)
		}
	}
	_ = writer.Flush() // into memory
	return table.String()
}

// Refused returns the objects that are refused themselves or in a part.
func (result Result) Refused() map[corev1.ObjectReference]bool {
	refused := map[corev1.ObjectReference]bool{} // a Pod of several Services is one object
	for _, verdict := range result.Verdicts() {
		if !verdict.Accepted {
			refused[verdict.Object] = true
		}
		for _, problem := range verdict.Refusals() {
			refused[problem.Object] = true
		}
	}
	return refused
}

// Verdicts returns all verdicts, the one on the Trench first.
func (result Result) Verdicts() []Verdict {
	all := []Verdict{result.Trench}
	for _, verdict := range result.Services {
		all = append(all, verdict.Verdict)
	}
	return all
}

// Refusals returns the problems with an effect on the traffic.
func (verdict Verdict) Refusals() []Problem {
	return slices.DeleteFunc(slices.Clone(verdict.Problems), Problem.Warning)
}
