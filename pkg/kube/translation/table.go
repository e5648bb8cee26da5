package translation

import (
	"fmt"
	"strings"
	"text/tabwriter"

	corev1 "k8s.io/api/core/v1"
)

// Table returns the verdicts as a table with one line for each object and each problem.
func (r Result) Table() string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "KIND\tNAME\tACCEPTED\tREASON\tMESSAGE")
	row := func(o corev1.ObjectReference, accepted bool, reason, message string) {
		name := strings.TrimPrefix(o.Namespace+"/"+o.Name, "/")
		fmt.Fprintf(w, "%s\t%s\t%t\t%s\t%s\n", o.Kind, name, accepted, reason, strings.ReplaceAll(message, "\n", " "))
	}
	verdict := func(v Verdict) {
		row(v.Object, v.Accepted, v.Reason, v.Message)
		for _, p := range v.Problems {
			row(p.Object, p.Warning(), p.Reason, p.Message)
		}
	}
	verdict(r.Trench)
	for _, v := range r.Services {
		verdict(v.Verdict)
	}
	_ = w.Flush() // into memory
	return b.String()
}

// Refused reports whether any object, or a part of it, is refused.
func (r Result) Refused() bool {
	refused := !r.Trench.Accepted || len(r.Trench.Problems) > 0
	for _, v := range r.Services {
		refused = refused || !v.Accepted || len(v.Problems) > 0
	}
	return refused
}
