package status

import (
	"cmp"
	_ "embed"
	"fmt"
	"strings"
	"sync"

	"google.golang.org/protobuf/reflect/protoreflect"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	targetv1 "github.com/vipgate/vipgate/pkg/api/target/v1"
)

// Explanation explains one value of an enum.
type Explanation struct {
	// Short fits into a table.
	Short string
	// Meaning is one sentence.
	Meaning string
	// Next is the next check or action; empty without a problem.
	Next string
}

//go:embed explanations.txt
var explanationText string

// explanations maps the name of each value to its entry in explanations.txt.
var explanations = sync.OnceValue(func() map[string]Explanation {
	all := map[string]Explanation{}
	for block := range strings.SplitSeq(strings.TrimSpace(explanationText), "\n\n") {
		// A value without a problem has no line for the next check.
		lines := append(strings.Split(block, "\n"), "", "", "")
		all[lines[0]] = Explanation{lines[1], lines[2], lines[3]}
	}
	return all
})

// Reason is an enum whose values are explained: the reason of an advertisement or of the readiness
// of a VIP, or the state of a target.
type Reason interface {
	readinessv1.AdvertisementReason | readinessv1.VipReason | targetv1.State
	String() string
	Number() protoreflect.EnumNumber
}

// Explain explains a value. A value from a newer program has a generic explanation.
func Explain[R Reason](value R) Explanation {
	if explanation, known := explanations()[value.String()]; known {
		return explanation
	}
	kind := "reason"
	if _, is := any(value).(targetv1.State); is {
		kind = "state"
	}
	return Explanation{
		fmt.Sprintf("%s %d", kind, value.Number()),
		"The running program gives a " + kind + " that this one does not know.",
		"use the command of the running program's version",
	}
}

// explainWord explains the reason of an event, the name of an enum's value without its prefix, in
// lower case. An unknown word explains itself.
func explainWord(prefix, word string) string {
	return cmp.Or(explanations()[prefix+strings.ToUpper(word)].Short, word)
}

// words holds the text of a value in a cell. Values are sorted by rank, problems first.
type words struct {
	cell string
	rank int
}

var advertisements = map[readinessv1.Advertisement]words{
	readinessv1.Advertisement_ADVERTISEMENT_ANNOUNCED:   {"yes", 2},
	readinessv1.Advertisement_ADVERTISEMENT_DEPREFERRED: {"de-preferred", 1},
	readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN:   {"NO", 0},
}

var vipStates = map[readinessv1.VipState]words{
	readinessv1.VipState_VIP_STATE_READY:     {cell: "ready", rank: 2},
	readinessv1.VipState_VIP_STATE_DRAINING:  {cell: "draining", rank: 1},
	readinessv1.VipState_VIP_STATE_NOT_READY: {cell: "not ready"},
}

func advertised(advertisement readinessv1.Advertisement) string {
	return cmp.Or(advertisements[advertisement].cell, none)
}

// isAdvertised reports whether the VIP is advertised to gateways.
func isAdvertised(advertisement readinessv1.Advertisement) bool {
	return advertisements[advertisement].rank > 0
}

func vipState(state readinessv1.VipState) string { return cmp.Or(vipStates[state].cell, none) }
