package translation

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
	"github.com/vipgate/vipgate/pkg/trench"
	trenchfile "github.com/vipgate/vipgate/pkg/trench/file"
	"github.com/vipgate/vipgate/pkg/vip"
)

// minInterval is the least interval of checks in an annotation, because all tenants share lb.
const minInterval = 100 * time.Millisecond

// operatorFields lists the fields of a check that only writers of the Trench have. With them the
// owner of a Service would send lb's requests into other networks, and read lb's files.
var operatorFields = []string{"via", "source", "caFile", "certFile", "keyFile"}

// refuseCheck returns why a Service may not have a check, or a part of it; nil if it may. The check
// is valid otherwise.
func refuseCheck(part any, path string) (refused *refusal) {
	switch part := part.(type) {
	case []any:
		for i, item := range part {
			if refused = refuseCheck(item, fmt.Sprintf("%s[%d]", path, i)); refused != nil {
				return refused
			}
		}
	case map[string]any:
		for _, key := range slices.Sorted(maps.Keys(part)) {
			field := strings.TrimPrefix(path+"."+key, ".")
			text, _ := part[key].(string)
			interval, err := time.ParseDuration(text)
			switch {
			// These methods let a request change what it asks.
			case slices.Contains(operatorFields, key), key == "method" && (text == "POST" || text == "PUT"):
				return refuse(ReasonInvalidAnnotation, "annotation %s: %s: a Service cannot have it: remove it, or let "+
					"spec.defaults.check or a stream of spec.streams of the Trench have it", v1alpha1.CheckAnnotation, field)
			case (key == "interval" || key == "fastInterval") && err == nil && interval < minInterval:
				return refuse(ReasonInvalidAnnotation, "annotation %s: %s: is %s, and a Service has %s at least: write more, "+
					"or let spec.defaults.check of the Trench have it", v1alpha1.CheckAnnotation, field, text, minInterval)
			}
			if refused = refuseCheck(part[key], field); refused != nil {
				return refused
			}
		}
	}
	return nil
}

// refuseCommunities returns why a Service of another namespace may not have the policy of its stream:
// gateways may act on communities.
func (state *translator) refuseCommunities(service *corev1.Service, stream string) *refusal {
	if service.Namespace == state.settings.trench.Namespace {
		return nil
	}
	policy := state.policies[stream]
	for _, attributes := range []*trench.Attributes{&policy.Ready, policy.Draining, policy.Unknown, policy.Backup} {
		if attributes == nil {
			continue
		}
		for _, community := range attributes.Communities {
			if !slices.Contains(state.settings.trench.Spec.Communities, community) {
				return refuse(ReasonInvalidAnnotation, "annotation %s: community %s is not one of spec.communities of the "+
					"Trench: remove it, or add it there", v1alpha1.PolicyAnnotation, community)
			}
		}
	}
	return nil
}

// amounts are streams, targets, each as often as it is checked a second, and expressions.
type amounts [3]int

// readQuota sets the limits of the namespaces other than the Trench's.
func (state *translator) readQuota() {
	whole := v1alpha1.DefaultQuota
	own := *cmp.Or(state.settings.trench.Spec.Quota, &whole)
	each := amounts{
		cmp.Or(own.Streams, whole.Streams), cmp.Or(own.Targets, whole.Targets), cmp.Or(own.Expressions, whole.Expressions),
	}
	all := amounts{max(v1alpha1.MaxStreams, each[0]), max(v1alpha1.MaxTargets, each[1]), math.MaxInt}
	state.limits, state.used, state.lent = [2]amounts{each, all}, map[string]amounts{}, map[string]int{}
}

// add returns why a Service may not have a stream with count targets, or at least those that make
// it ready, or else counts it. What was counted before stays, so that it may fall back. The last
// form of a Service with VIPs keeps the targets that make it ready, also without room: a subnet of
// another family may have doubled their checks. They pass the quota twice at most, because tenants
// may forge records.
func (state *translator) add(candidate *candidate, stream *trench.Stream, count int) *refusal {
	namespace := candidate.service.Namespace
	if namespace == state.settings.trench.Namespace {
		candidate.most = math.MaxInt
		return nil
	}
	rate, least := state.rate(&stream.Check), max(1, stream.MinReady)
	need := amounts{1, max(least, count) * rate, 0}
	kept := len(candidate.held) > 0 && candidate.last != nil && (!candidate.edited || candidate.stream == nil)
	lack := max(0, need[1]-state.room(candidate))
	if !kept || candidate.most == 0 && state.lent[namespace]+lack > 2*state.limits[0][1] {
		lack = 0
	}
	need[1] -= lack
	// The kernel keeps a table for each in the memory of lb.
	if stream.Maglev.Size > state.defaults.Maglev.Size {
		need[0] = (int(stream.Maglev.Size) + 1008) / 1009
	}
	if stream.Check != state.defaults.Check {
		need[2] = expressions(&stream.Check)
	}
	used := [2]amounts{state.used[namespace], state.used[""]}
	for i, name := range []string{"streams", "targets", "expressions"} {
		need[i] = max(need[i], candidate.counted[i])
		more := need[i] - candidate.counted[i]
		for j, who := range []string{"namespace " + namespace + " has", "the other namespaces of the Trench have"} {
			if used[j][i] += more; more > 0 && used[j][i] > state.limits[j][i] {
				return refuse(ReasonQuotaExceeded, "%s more than %d %s with it (1009 of maglev.size are a stream, one check a "+
					"second a target): remove some, or raise spec.quota.%[3]s of the Trench above that", who,
					state.limits[j][i], name)
			}
		}
	}
	state.used[namespace], state.used[""] = used[0], used[1]
	if candidate.most == 0 {
		state.lent[namespace] += lack
	}
	candidate.counted, candidate.most = need, max(least, need[1]/rate)
	return nil
}

// room returns how many checks a second a Service may have.
func (state *translator) room(candidate *candidate) int {
	return candidate.counted[1] + min(state.limits[0][1]-state.used[candidate.service.Namespace][1],
		state.limits[1][1]-state.used[""][1])
}

// grow counts up to count targets of a Service, while there is room.
func (state *translator) grow(candidate *candidate, count int) {
	state.add(candidate, candidate.stream, min(count, state.room(candidate)/state.rate(&candidate.stream.Check)))
}

// spread counts the targets of Services that have VIPs: as many as serve, or also new ones.
func (state *translator) spread(all []*candidate, fresh bool) {
	for _, next := range all {
		if next.stream != nil && fresh {
			state.grow(next, targets(next.stream))
		} else if next.stream != nil { // a number, because a rollout replaces the names
			state.grow(next, min(targets(next.stream), len(next.generations.Current.Targets[0])))
		}
	}
}

// limit leaves out the targets of a stream that are not counted, of which new ones are first.
func (state *translator) limit(candidate *candidate) {
	stream, counts := candidate.stream, map[bool]int{}
	if state.grow(candidate, targets(stream)); targets(stream) > candidate.most {
		order := func(target trench.Target) int {
			_, serves := slices.BinarySearch(candidate.generations.Current.Targets[0], target.Name)
			return map[bool]int{true: -1}[serves]
		}
		slices.SortStableFunc(stream.Targets, func(a, b trench.Target) int { return order(a) - order(b) })
		stream.Targets = slices.DeleteFunc(stream.Targets, func(target trench.Target) bool {
			counts[target.Terminating]++
			return counts[target.Terminating] > candidate.most
		})
		slices.SortFunc(stream.Targets, func(a, b trench.Target) int { return cmp.Compare(a.Name, b.Name) })
		if counts[false] > candidate.most {
			candidate.problems = append(candidate.problems, Problem{reference(candidate.service), ReasonQuotaExceeded, message(
				"the Service gets %d of %d targets (one check a second each), of %d of its namespace and %d of all: remove "+
					"some, or raise spec.quota.targets of the Trench", candidate.most, counts[false], state.limits[0][1],
				state.limits[1][1])})
		}
	}
	candidate.addEarlier()
}

// targets counts the targets of a stream without those that a rollout replaces.
func targets(stream *trench.Stream) int {
	counts := map[bool]int{}
	for _, target := range stream.Targets {
		counts[target.Terminating]++
	}
	return max(counts[false], counts[true])
}

// rate returns how many checks a target has each second at most, at least 1. Each one that fails
// through the VIP occupies connection tracking for 2 min.
func (state *translator) rate(check *trench.Check) (count int) {
	members, _ := check.Members()
	for _, member := range members {
		interval := cmp.Or(member.FastInterval, check.FastInterval, member.Interval, check.Interval, time.Second)
		count += int((time.Second + interval - 1) / interval)
	}
	// Families of the present targets would change without an edit.
	has := func(family vip.Family) bool {
		subnets := state.settings.subnets
		return check.Families.Has(family) && (len(subnets) == 0 || slices.ContainsFunc(subnets,
			func(subnet netip.Prefix) bool { return vip.FamilyOf(subnet.Addr()) == family }))
	}
	if has(vip.IPv4) && has(vip.IPv6) {
		count *= 2
	}
	return count
}

// ranked returns candidates by age, after those that have VIPs, of which edited ones, and those
// without a record of their form, are last. The last one loses its place first.
func ranked(all []*candidate) []*candidate {
	return slices.SortedStableFunc(slices.Values(all), func(a, b *candidate) int { return b.rank() - a.rank() })
}

func (candidate *candidate) rank() int {
	edited := candidate.edited && candidate.stream != nil && candidate.refused == nil
	switch {
	case len(candidate.held) == 0 || candidate.last == nil || edited:
		return min(len(candidate.held), 1)
	case candidate.serves: // an older one without a stream does not take its place
		return 3
	}
	return 2
}

func (candidate *candidate) drop() { candidate.stream, candidate.problems = nil, nil }

// expressions counts the regular expressions of a check.
func expressions(check *trench.Check) (count int) {
	members, _ := check.Members()
	for _, member := range members {
		if cmp.Or(member.HTTP.Body, member.DNS.Answer) != "" { // it is of one kind
			count++
		}
	}
	return count
}

// shrink refuses Services of the other namespaces with most bytes until the trench file has excess
// bytes less, so that no tenant has the Trench refused; those of the least rank first. It reports
// whether it refused any.
func (state *translator) shrink(all []*candidate, excess int) (refused bool) {
	byNamespace, total := map[string][]*candidate{}, map[string]int{}
	size := func(candidate *candidate) int {
		config := trench.Config{Streams: []trench.Stream{*candidate.stream}}
		if policy, ok := state.policies[candidate.stream.Name]; ok {
			config.Attractor.Policies = []trench.Policy{policy}
		}
		return len(trenchfile.Marshal(&config))
	}
	for _, candidate := range ranked(all) {
		if namespace := candidate.service.Namespace; candidate.stream != nil &&
			namespace != state.settings.trench.Namespace {
			byNamespace[namespace] = append(byNamespace[namespace], candidate)
			total[namespace] += size(candidate)
		}
	}
	last := func(namespace string) *candidate { return byNamespace[namespace][len(byNamespace[namespace])-1] }
	for ; excess > 0 && len(total) > 0; refused = true {
		largest := slices.MaxFunc(slices.Sorted(maps.Keys(total)), func(a, b string) int {
			return cmp.Or(last(b).rank()-last(a).rank(), cmp.Compare(total[a], total[b]))
		})
		list, next := byNamespace[largest], last(largest)
		less, edit := size(next), next.edited && next.refused == nil
		next.refused = refuse(ReasonQuotaExceeded, "the trench file would have more than %d bytes with it: "+
			"remove Services of namespace %s, or use several Trenches", trenchfile.MaxSize, largest)
		if next.drop(); edit {
			state.fallBack(next)
		}
		if next.stream != nil { // its last form
			state.limit(next)
			less -= size(next)
		}
		excess -= less
		total[largest] -= less
		if byNamespace[largest] = list[:len(list)-1]; len(list) == 1 {
			delete(total, largest)
		}
	}
	return refused
}
