package status

import (
	"reflect"
	"slices"
	"testing"
)

func TestTally(t *testing.T) {
	var tally Tally[string]
	for i, x := range []string{"a", "a", "b", "a", "c", "c"} {
		if got, want := tally.Add(x), []int{0, 0, 1, 0, 2, 2}[i]; got != want {
			t.Errorf("%s is at %d, want %d", x, got, want)
		}
	}
	if got, want := tally.List(), []Tallied[string]{{"a", 3}, {"b", 1}, {"c", 2}}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestDescribeVIPs(t *testing.T) {
	list := []Transitions{
		{Count: 9000, Family: "ipv4", From: "announced", To: "withdrawn", Reason: "lb_not_ready", Detail: "0 of 1"},
		{Count: 50, Family: "ipv6", From: "ready", To: "removed"},
	}
	want := "20.0.0.1/32, 20.0.0.2/32 and 9048 more: " +
		"9000 ipv4 announced to withdrawn, lb_not_ready (0 of 1); 50 ipv6 ready to removed"
	if got := DescribeVIPs(list, []string{"20.0.0.1/32", "20.0.0.2/32"}, 9050); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	many := make([]Transitions, 7)
	for i := range many {
		many[i] = Transitions{Count: 10, Family: "ipv4", From: "a", To: "b"}
	}
	want = "10 ipv4 a to b; 10 ipv4 a to b; 10 ipv4 a to b; 10 ipv4 a to b; 10 ipv4 a to b; 20 others"
	if got := Describe(many); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestLogAttributes(t *testing.T) {
	list := []Transitions{
		{Count: 90, Family: "ipv4", From: "announced", To: "withdrawn", Reason: "lb_not_ready"},
		{Count: 10, Family: "ipv6", From: "depreferred", To: "withdrawn", Reason: "lb_draining"},
	}
	first := []string{"20.0.0.1/32"}
	for _, tt := range []struct {
		list []Transitions
		want []any
	}{
		{list[:1], []any{
			"count", 100, "from", "announced", "to", "withdrawn", "reason", "lb_not_ready",
			"transitions", "90 ipv4 announced to withdrawn, lb_not_ready", "vips", first,
		}},
		{list, []any{
			"count", 100, "to", "withdrawn", "transitions",
			"90 ipv4 announced to withdrawn, lb_not_ready; 10 ipv6 depreferred to withdrawn, lb_draining", "vips", first,
		}},
	} {
		if got := LogAttributes(100, tt.list, first); !reflect.DeepEqual(got, tt.want) {
			t.Errorf("got %v, want %v", got, tt.want)
		}
	}
}
