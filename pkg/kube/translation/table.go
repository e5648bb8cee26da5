package translation

import (
	"fmt"
	"strings"
	"text/tabwriter"

	corev1 "k8s.io/api/core/v1"
)

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
	verdict := func(judged Verdict) {
		row(judged.Object, judged.Accepted, judged.Reason, judged.Message)
		for _, problem := range judged.Problems {
			row(problem.Object, problem.Warning(), problem.Reason, problem.Message)
		}
	}
	verdict(result.Trench)
	for _, judged := range result.Services {
		verdict(judged.Verdict)
	}
	_ = writer.Flush() // into memory
	return table.String()
}

// Refused reports whether any object, or a part of it, is refused.
func (result Result) Refused() bool {
	refused := !result.Trench.Accepted || len(result.Trench.Problems) > 0
	for _, verdict := range result.Services {
		refused = refused || !verdict.Accepted || len(verdict.Problems) > 0
	}
	return refused
}
