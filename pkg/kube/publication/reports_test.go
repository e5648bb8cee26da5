package publication

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// A report that is not renewed becomes old after a number of renewals of this process's report,
// fewer for a Pod that is not Ready. Without these renewals no report becomes old.
func TestReportsAge(t *testing.T) {
	ready := func(name string, status corev1.ConditionStatus) *corev1.Pod {
		p := annotated(name, "")
		p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: status}}
		return p
	}
	for _, c := range []struct {
		name   string
		status corev1.ConditionStatus
		own    []int // second of the last renewal of this process's report, at each evaluation
		other  []int
		old    []bool
	}{
		{
			"both renewed", "True",
			[]int{0, 10, 20, 30, 40},
			[]int{5, 15, 25, 35, 45},
			[]bool{false, false, false, false, false},
		},
		{"one dead", "True", []int{0, 10, 20, 30, 40}, []int{5, 5, 5, 5, 5}, []bool{false, false, false, true, true}},
		{"not Ready", "False", []int{0, 10, 20, 30, 40}, []int{5, 5, 5, 5, 5}, []bool{false, false, true, true, true}},
		{"returns", "True", []int{0, 10, 20, 30, 40}, []int{5, 5, 5, 5, 45}, []bool{false, false, false, true, false}},
		{"API server away", "True", []int{0, 0, 0, 0, 100}, []int{5, 5, 5, 5, 5}, []bool{false, false, false, false, false}},
		{"own changes", "False", []int{0, 3, 6, 9, 12}, []int{5, 5, 5, 5, 5}, []bool{false, false, false, false, false}},
		{
			"own clock set back", "True",
			[]int{3600, 3610, 20, 30, 40, 50},
			[]int{5, 5, 5, 5, 5, 5},
			[]bool{false, false, false, false, true, true},
		},
		{
			"clock behind", "True",
			[]int{0, 10, 20, 30, 40},
			[]int{-99, -89, -79, -69, -59},
			[]bool{false, false, false, false, false},
		},
	} {
		a := ages{interval: 10 * time.Second, seen: map[types.UID]renewal{}}
		pods := []*corev1.Pod{ready("b", c.status), ready("a", "True")}
		for i, want := range c.old {
			renewed := func(second int) Reported {
				return Reported{Report: Report{Renewed: at.Add(time.Duration(second) * time.Second)}}
			}
			reports := map[types.UID]Reported{"a": renewed(c.own[i]), "b": renewed(c.other[i])}
			a.mark(pods, "a", reports)
			if reports["b"].Old != want || reports["a"].Old {
				t.Errorf("%s, look %d: old %t, want %t", c.name, i+1, reports["b"].Old, want)
			}
		}
	}
}
