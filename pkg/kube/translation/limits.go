package translation

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
	"github.com/vipgate/vipgate/pkg/trench"
	trenchfile "github.com/vipgate/vipgate/pkg/trench/file"
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

// account counts what the namespaces other than the Trench's have.
type account struct {
	own      string       // namespace of the Trench
	defaults trench.Check // whose expressions are the Trench's
	quota    v1alpha1.Quota
	used     map[string]v1alpha1.Quota
	total    int // of streams
}

func (state *translator) newAccount() *account {
	quota := v1alpha1.DefaultQuota
	if own := state.settings.trench.Spec.Quota; own != nil {
		quota.Streams = cmp.Or(own.Streams, quota.Streams)
		quota.Targets = cmp.Or(own.Targets, quota.Targets)
		quota.Expressions = cmp.Or(own.Expressions, quota.Expressions)
	}
	return &account{state.settings.trench.Namespace, state.defaults.Check, quota, map[string]v1alpha1.Quota{}, 0}
}

// add returns why a Service may not have its stream, which may be nil, or else counts it.
func (account *account) add(candidate *candidate) *refusal {
	namespace, stream := candidate.service.Namespace, candidate.stream
	if namespace == account.own || stream == nil {
		return nil
	}
	quota, used := account.quota, account.used[namespace]
	// The kernel keeps a table for each in the memory of lb.
	weight := max(1, (int(stream.Maglev.Size)+1008)/1009)
	used.Streams += weight
	used.Targets += targets(stream)
	if stream.Check != account.defaults {
		used.Expressions += expressions(&stream.Check)
	}
	if len(candidate.held) > 0 {
		used.Targets = min(used.Targets, quota.Targets) // limit bounds them
	}
	for _, field := range []struct {
		name        string
		used, limit int
	}{
		{"streams", used.Streams, quota.Streams},
		{"targets", used.Targets, quota.Targets},
		{"expressions", used.Expressions, quota.Expressions},
	} {
		if field.used > field.limit {
			return refuse(ReasonQuotaExceeded, "namespace %s has more than %d %s with it (1009 of maglev.size are a "+
				"stream, a check each second a target): remove some, or raise spec.quota.%[3]s of the Trench", namespace,
				field.limit, field.name)
		}
	}
	if most := max(v1alpha1.MaxStreams, quota.Streams); account.total+weight > most {
		return refuse(ReasonQuotaExceeded, "the other namespaces of the Trench have more than %d streams with it (1009 of "+
			"maglev.size are one): remove some, or raise spec.quota.streams of the Trench above that", most)
	}
	account.used[namespace], account.total = used, account.total+weight
	return nil
}

// limit drops the streams that pass a quota. A Service that has VIPs is not refused for new targets
// of others, but the largest ones have fewer.
func (state *translator) limit(all []*candidate) {
	account, counts := state.newAccount(), map[string][]int{}
	for _, candidate := range all {
		if namespace := candidate.service.Namespace; len(candidate.held) > 0 && candidate.stream != nil {
			counts[namespace] = append(counts[namespace], targets(candidate.stream))
		}
	}
	for _, candidate := range ranked(all) {
		namespace := candidate.service.Namespace
		if len(candidate.held) > 0 && namespace != account.own {
			candidate.cut(max(1, level(counts[namespace], account.quota.Targets)), account.quota.Targets)
		}
		if refused := account.add(candidate); refused != nil {
			candidate.refused = cmp.Or(candidate.refused, refused)
			candidate.drop()
		}
	}
}

// targets counts the targets of a stream without those that a rollout replaces.
func targets(stream *trench.Stream) int {
	counts := map[bool]int{}
	for _, target := range stream.Targets {
		counts[target.Terminating]++
	}
	return max(counts[false], counts[true]) * perSecond(&stream.Check)
}

// perSecond returns how many checks a target has each second, at least 1. Each one that fails
// through the VIP occupies connection tracking for 2 min.
func perSecond(check *trench.Check) (count int) {
	members, _ := check.Members()
	for _, member := range members {
		interval := cmp.Or(member.Interval, check.Interval, time.Second)
		count += int((time.Second + interval - 1) / interval)
	}
	return count
}

// level returns how many targets each of several streams may have, so that they have limit in
// total.
func level(counts []int, limit int) int {
	slices.Sort(counts)
	for i, count := range counts {
		if share := limit / (len(counts) - i); count > share {
			return share
		}
		limit -= count
	}
	return math.MaxInt
}

// cut leaves out the targets beyond most of a stream, so that others have room in the quota.
func (candidate *candidate) cut(most, quota int) {
	stream, counts := candidate.stream, map[bool]int{}
	if stream == nil || targets(stream) <= most {
		return
	}
	most = max(1, most/perSecond(&stream.Check))
	stream.Targets = slices.DeleteFunc(stream.Targets, func(target trench.Target) bool {
		counts[target.Terminating]++
		return counts[target.Terminating] > most
	})
	candidate.problems = append(candidate.problems, Problem{reference(candidate.service), ReasonQuotaExceeded, message(
		"namespace %s has more than %d targets, of which the Service gets %d, and has %d: remove some, or raise "+
			"spec.quota.targets of the Trench", candidate.service.Namespace, quota, most, counts[false])})
}

// ranked returns candidates by age, after those that have VIPs, of which those with a changed table
// or check are last: an edit takes no other Service's place. The last one loses its place first.
func ranked(all []*candidate) []*candidate {
	rank := func(candidate *candidate) int {
		last, now := candidate.last, candidate.service.Annotations
		if len(candidate.held) > 0 && last != nil &&
			last.Annotations[v1alpha1.MaglevAnnotation] == now[v1alpha1.MaglevAnnotation] &&
			last.Annotations[v1alpha1.CheckAnnotation] == now[v1alpha1.CheckAnnotation] {
			return 2
		}
		return min(len(candidate.held), 1)
	}
	return slices.SortedStableFunc(slices.Values(all), func(a, b *candidate) int { return cmp.Compare(rank(b), rank(a)) })
}

func (candidate *candidate) drop() { candidate.stream, candidate.problems = nil, nil }

// expressions counts the regular expressions of a check.
func expressions(check *trench.Check) (count int) {
	members, _ := check.Members()
	for _, member := range members {
		for _, text := range []string{member.HTTP.Body, member.DNS.Answer} {
			if text != "" {
				count++
			}
		}
	}
	return count
}

// shrink refuses Services of the other namespaces with most bytes until the trench file has excess
// bytes less, so that no tenant has the Trench refused; those without VIPs first. It reports
// whether it refused any.
func (state *translator) shrink(all []*candidate, excess int) (refused bool) {
	byNamespace, sizes, total := map[string][]*candidate{}, map[*candidate]int{}, map[string]int{}
	for _, candidate := range ranked(all) {
		if namespace := candidate.service.Namespace; candidate.stream != nil &&
			namespace != state.settings.trench.Namespace {
			config := trench.Config{Streams: []trench.Stream{*candidate.stream}}
			if policy, ok := state.policies[candidate.stream.Name]; ok {
				config.Attractor.Policies = []trench.Policy{policy}
			}
			sizes[candidate] = len(trenchfile.Marshal(&config))
			byNamespace[namespace] = append(byNamespace[namespace], candidate)
			total[namespace] += sizes[candidate]
		}
	}
	has := func(namespace string) int {
		list := byNamespace[namespace]
		return min(len(list[len(list)-1].held), 1)
	}
	for ; excess > 0 && len(total) > 0; refused = true {
		largest := slices.MaxFunc(slices.Sorted(maps.Keys(total)), func(a, b string) int {
			return cmp.Or(cmp.Compare(has(b), has(a)), cmp.Compare(total[a], total[b]))
		})
		list := byNamespace[largest]
		last := list[len(list)-1]
		last.refused = refuse(ReasonQuotaExceeded, "the trench file would have more than %d bytes with it: "+
			"remove Services of namespace %s, or use several Trenches", trenchfile.MaxSize, largest)
		last.drop()
		excess -= sizes[last]
		total[largest] -= sizes[last]
		if byNamespace[largest] = list[:len(list)-1]; len(list) == 1 {
			delete(total, largest)
		}
	}
	return refused
}
