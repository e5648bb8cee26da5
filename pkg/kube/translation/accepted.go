package translation

import (
	"encoding/json"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// maxRecord is the maximum size of a record in bytes, the API server's for a condition's message.
const maxRecord = 32 << 10

// record is the last accepted form of the fields of a Service that define its stream. The leader
// stores it in the condition LastAccepted of the Service, so that every pod, including a new one,
// reads the same record.
type record struct {
	// Generation counts the accepted forms: Services have no metadata.generation.
	Generation int64 `json:"generation"`
	// Annotations has no VIPs if they do not fit: the status of the Trench lists them, too.
	Annotations              map[string]string    `json:"annotations"`
	Ports                    []corev1.ServicePort `json:"ports,omitempty"`
	Selector                 map[string]string    `json:"selector,omitempty"`
	PublishNotReadyAddresses bool                 `json:"publishNotReadyAddresses,omitempty"`
}

// Record returns the record of an accepted Service as JSON, or "" if it is too large.
func Record(service *corev1.Service) string {
	last, _ := recordOf[record](service, v1alpha1.LastAccepted)
	accepted := record{
		Generation: last.Generation, Annotations: map[string]string{}, Ports: service.Spec.Ports,
		Selector:                 service.Spec.Selector,
		PublishNotReadyAddresses: service.Spec.PublishNotReadyAddresses,
	}
	for _, name := range annotations {
		if text, ok := service.Annotations[name]; ok {
			accepted.Annotations[name] = text
		}
	}
	if text, _ := json.Marshal(accepted); len(text) >= maxRecord { // with room for a longer number
		delete(accepted.Annotations, v1alpha1.VIPsAnnotation)
	}
	if !equality.Semantic.DeepEqual(accepted, last) {
		accepted.Generation++
	}
	text, err := json.Marshal(accepted)
	if err != nil || len(text) > maxRecord {
		return ""
	}
	return string(text)
}

// recordOf returns the record in a condition of a Service, and reports whether a valid one exists.
func recordOf[T any](service *corev1.Service, condition string) (record T, ok bool) {
	if message := conditionMessage(service, condition); message != "" {
		ok = json.Unmarshal([]byte(message), &record) == nil
	}
	return record, ok
}

// renamed reports whether the ports of a Service differ from its last accepted form.
func renamed(service *corev1.Service) bool {
	last, ok := recordOf[record](service, v1alpha1.LastAccepted)
	return ok && !equality.Semantic.DeepEqual(last.Ports, service.Spec.Ports)
}

// candidate is a Service with the stream that is assigned to it.
type candidate struct {
	service  *corev1.Service
	last     *corev1.Service // the last accepted form; nil if it was never accepted
	number   int64           // generation of the accepted form
	edited   bool            // reports whether last differs from service
	counted  amounts         // in the quotas
	most     int             // targets of those
	held     vip.Set         // VIPs that it had
	reserved []vip.VIP       // the same, also without a stream
	refused  *refusal        // why the described stream is not assigned
	stream   *trench.Stream  // nil if no stream is assigned
	problems []Problem

	generations plan.Generations // of its targets
	serves      bool             // reports whether it has these, because it had a stream
}

// candidates returns each Service with the stream that it describes, or else with its last
// accepted stream, without regard to conflicts between Services. services is sorted by age,
// oldest first. Of other namespaces the youngest that pass a quota have none.
func (state *translator) candidates(services []*corev1.Service) []*candidate {
	all := append(make([]*candidate, len(services)), state.absent(services)...)
	for position, service := range services {
		next := &candidate{service: service}
		all[position] = next
		// An accepted Service has a record, too: share prefers the last holder of a VIP.
		var recorded []vip.VIP
		if last, ok := recordOf[record](service, v1alpha1.LastAccepted); ok {
			recorded = next.accepted(last, state.settings.holders.vips[holderOf(service)])
		}
		state.holds(next, recorded)
		if state.settings.holders.believes(service) {
			next.generations, next.serves = recordOf[plan.Generations](service, v1alpha1.Generations)
		}
	}
	state.readQuota()
	// An edit takes no place, nor its own: first the last forms of Services with VIPs have theirs.
	order := ranked(all)
	for _, recorded := range []bool{true, false} {
		for _, next := range order {
			switch {
			case len(next.held) == 0 || (next.last != nil) != recorded:
			case next.edited:
				state.fallBack(next)
			default:
				state.describe(next)
			}
		}
		state.spread(all, false) // before Services without a record, whose edits are not known, take more
	}
	state.spread(all, true)
	for _, next := range order {
		if len(next.held) == 0 || next.edited {
			state.describe(next)
		}
	}
	return all
}

// describe assigns a Service the stream that it describes, or else its last accepted one.
func (state *translator) describe(next *candidate) {
	next.stream, next.refused = state.newStream(next.service)
	if next.refused == nil && len(next.held) == 0 {
		used := maps.Clone(state.used) // many without a place must not visit all Pods
		next.refused = state.add(&candidate{service: next.service}, next.stream, 0)
		state.used = used
	}
	if next.refused == nil && Record(next.service) == "" && (len(next.held) == 0 || next.last != nil) {
		next.refused = refuse(ReasonInvalid, "its annotations, ports and selector have more than %d bytes without the VIPs, "+
			"and a refused edit would end its stream: shorten them", maxRecord)
	}
	if next.refused == nil {
		next.problems, next.refused = state.addTargets(next.service, next.stream)
	}
	if next.refused == nil {
		if len(next.held) == 0 {
			next.most = targets(next.stream) // all must fit
		}
		// At once, because thousands of streams would fill the memory.
		next.refused = state.add(next, next.stream, min(next.most, targets(next.stream)))
	}
	if next.refused != nil {
		state.fallBack(next)
	}
}

// accepted restores the last accepted form from a record, or its VIPs from those that the Trench
// lists, and returns these.
func (candidate *candidate) accepted(form record, listed []vip.VIP) []vip.VIP {
	if _, ok := form.Annotations[v1alpha1.VIPsAnnotation]; !ok && form.Annotations != nil {
		text := candidate.service.Annotations[v1alpha1.VIPsAnnotation]
		if claimed, _ := parseVIPs(candidate.service); !maps.Equal(vip.NewSet(claimed...), vip.NewSet(listed...)) {
			text = strings.Join(vip.Texts(listed), ",")
		}
		form.Annotations[v1alpha1.VIPsAnnotation] = text
	}
	// The Service is shared and must not be modified.
	last := *candidate.service
	last.Annotations, last.Spec.Ports, last.Spec.Selector = form.Annotations, form.Ports, form.Selector
	last.Spec.PublishNotReadyAddresses = form.PublishNotReadyAddresses
	vips, _ := parseVIPs(&last)
	candidate.last, candidate.number = &last, form.Generation
	candidate.edited = !equality.Semantic.DeepEqual(last.Spec, candidate.service.Spec)
	for _, name := range annotations {
		candidate.edited = candidate.edited || last.Annotations[name] != candidate.service.Annotations[name]
	}
	return vips
}

// fallBack assigns a refused Service its last accepted stream, without VIPs that the Trench no
// longer has. Its targets are computed from the current Pods.
func (state *translator) fallBack(candidate *candidate) {
	candidate.drop()
	if candidate.last == nil {
		return
	}
	last, form := *candidate.last, state.defaults
	// Without a stream, such as without Pods that have its ports, it keeps its place, too.
	readAnnotations(&last, &form)
	if state.add(candidate, &form, 0) != nil {
		return
	}
	vips, _ := parseVIPs(&last)
	// The Trench may have lost VIPs since; without any VIP left, newStream refuses the form, too.
	vips = slices.DeleteFunc(vips, func(served vip.VIP) bool { return state.lacks(served) != nil })
	last.Annotations = maps.Collect(maps.All(last.Annotations)) // a copy, also of nil
	last.Annotations[v1alpha1.VIPsAnnotation] = strings.Join(vip.Texts(vips), ",")
	if stream, refused := state.newStream(&last); refused == nil {
		if problems, refused := state.addTargets(&last, stream); refused == nil {
			candidate.stream, candidate.problems = stream, problems
		}
	}
}

// share assigns each VIP to one of the Services that claim it: to the Service that held it
// before, or else to the oldest. A Service that loses a VIP falls back to its last accepted
// stream. That stream may claim different VIPs, so the assignment is repeated after each change.
// It terminates, because a Service falls back only once, and then only loses VIPs.
func (state *translator) share(all []*candidate) {
	for {
		holders := map[vip.VIP]*candidate{}
		for _, candidate := range all {
			for _, claimed := range candidate.claims() {
				if holder := holders[claimed]; holder == nil || !holder.held.Has(claimed) && candidate.held.Has(claimed) {
					holders[claimed] = candidate
				}
			}
		}
		// Decide one Service at a time: its fall-back may free VIPs that the next Services claim.
		lost := map[*candidate]vip.VIP{}
		var losers []*candidate // that may fall back
		for _, loser := range all {
			vips := loser.vips()
			i := slices.IndexFunc(vips, func(claimed vip.VIP) bool { return holders[claimed] != loser })
			if i >= 0 {
				lost[loser] = vips[i]
			}
			if i >= 0 && (loser.last != nil || len(loser.held) > 0) {
				losers = append(losers, loser)
			}
		}
		if len(lost) == 0 {
			return
		}
		// Those with nothing to fall back to that lose to none of the others are refused first, together.
		batch := false
		for loser, claimed := range lost {
			if _, loses := lost[holders[claimed]]; !loses && loser.last == nil && len(loser.held) == 0 {
				loser.refused = refuseHeld(claimed, holders[claimed].service)
				loser.drop()
				batch = true
			}
		}
		if batch {
			continue
		}
		for i, candidate := range losers {
			claimed, holder := lost[candidate], holders[lost[candidate]]
			switch {
			case i > 0 && !holder.held.Has(claimed): // or else no fall-back frees the VIP
			case candidate.refused == nil:
				candidate.refused = refuseHeld(claimed, holder.service)
				state.fallBack(candidate)
			default:
				// It has fallen back already, and keeps the VIPs that no Service took.
				candidate.stream.VIPs = slices.DeleteFunc(candidate.stream.VIPs,
					func(claimed vip.VIP) bool { return holders[claimed] != candidate })
				if len(candidate.stream.VIPs) == 0 {
					candidate.drop()
				}
			}
		}
	}
}

func refuseHeld(claimed vip.VIP, holder *corev1.Service) *refusal {
	return refuse(ReasonVIPHeld, "Service %s/%s has VIP %s: choose another one, or delete that Service",
		holder.Namespace, holder.Name, claimed)
}

// vips returns the VIPs that a candidate claims.
func (candidate *candidate) vips() []vip.VIP {
	if candidate.stream == nil {
		return nil
	}
	return candidate.stream.VIPs
}

// claims returns the VIPs that no other Service gets from a candidate that had them.
func (candidate *candidate) claims() []vip.VIP {
	if candidate.stream == nil {
		return candidate.reserved
	}
	return candidate.stream.VIPs
}

func (state *translator) verdict(candidate *candidate) ServiceVerdict {
	verdict := ServiceVerdict{}
	verdict.Object, verdict.Generation = reference(candidate.service), candidate.service.Generation
	if stream := candidate.stream; stream != nil {
		state.settings.names[stream.Name] = true
		verdict.Stream, verdict.VIPs, verdict.Problems = stream.Name, stream.VIPs, candidate.problems
		for _, target := range stream.Targets {
			if !target.Terminating {
				verdict.Names = append(verdict.Names, target.Name)
			}
		}
		verdict.Targets = len(verdict.Names)
	}
	if candidate.refused == nil {
		verdict.Accepted, verdict.Reason = true, ReasonAccepted
		verdict.Message = message("serves %s as stream %s", list(verdict.VIPs), verdict.Stream)
		return verdict
	}
	verdict.Reason, verdict.Message = candidate.refused.reason, candidate.refused.message
	if candidate.stream != nil {
		// Truncate the reason, so that the generation and the VIPs fit in the message.
		verdict.Message = message("%.800s; serving generation %d: %s", verdict.Message, candidate.number, list(verdict.VIPs))
	}
	return verdict
}

// Warning reports whether a problem has no effect on the traffic.
func (problem Problem) Warning() bool {
	return slices.Contains([]string{
		ReasonUnknownAnnotation, ReasonSessionAffinity, ReasonSourceRanges, ReasonTCPCheck, ReasonAddressShared,
	}, problem.Reason)
}
