package translation

import (
	"cmp"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
	"github.com/vipgate/vipgate/pkg/vip"
)

// holderKey identifies a Service that has VIPs.
type holderKey struct {
	namespace, name string
	uid             types.UID
}

func holderOf(service *corev1.Service) holderKey {
	return holderKey{service.Namespace, service.Name, service.UID}
}

// holderList has the VIPs of Services by the status of the Trench, which their owners cannot write.
type holderList struct {
	vips map[holderKey][]vip.VIP
	all  vip.Set
	// partial reports whether a VIP that is not listed may have a holder: before the first write of a
	// leader, and of a list at its limit. The records of the Services count for such VIPs.
	partial bool
}

func readHolders(list []v1alpha1.Holder) holderList {
	result := holderList{vips: map[holderKey][]vip.VIP{}, all: vip.Set{}}
	for _, entry := range list {
		key := holderKey{entry.Namespace, entry.Name, entry.UID}
		for _, text := range entry.VIPs {
			if held, err := vip.Parse(text); err == nil && !result.all.Has(held) {
				result.vips[key], result.all[held] = append(result.vips[key], held), struct{}{}
			}
		}
	}
	result.partial = list == nil || len(result.all) >= v1alpha1.MaxHeld
	return result
}

// believes reports whether records in the status of a Service count, because it has VIPs.
func (list *holderList) believes(service *corev1.Service) bool {
	return list.partial || len(list.vips[holderOf(service)]) > 0
}

// holds sets the VIPs that a candidate had, recorded lists those of its own status. One that the
// Trench lacks is kept while the Service claims it: the Trench may have it again.
func (state *translator) holds(candidate *candidate, recorded []vip.VIP) {
	listed := &state.settings.holders
	claimed, _ := parseVIPs(candidate.service)
	candidate.reserved = slices.DeleteFunc(slices.Clone(listed.vips[holderOf(candidate.service)]),
		func(held vip.VIP) bool { return state.lacks(held) != nil && !slices.Contains(claimed, held) })
	for _, held := range recorded {
		if listed.partial && !listed.all.Has(held) && state.lacks(held) == nil {
			candidate.reserved = append(candidate.reserved, held)
		}
	}
	candidate.held = vip.NewSet(candidate.reserved...)
}

// absent returns candidates for holders in refused namespaces: no other Service takes their VIPs.
func (state *translator) absent(services []*corev1.Service) (all []*candidate) {
	for holder, vips := range state.settings.holders.vips {
		has := func(service *corev1.Service) bool { return holderOf(service) == holder }
		if state.settings.unreadable[holder.namespace] != "" && !slices.ContainsFunc(services, has) {
			service := &corev1.Service{}
			service.Namespace, service.Name, service.UID = holder.namespace, holder.name, holder.uid
			all = append(all, &candidate{service: service, reserved: vips, held: vip.NewSet(vips...)})
		}
	}
	return all
}

// holders returns the new list for the status of the Trench. A Service without a stream keeps its
// VIPs, so that no other Service takes them meanwhile; those that one took are its own. New VIPs
// take no place in a full list: their Services keep them by their records, which new rivals lack.
func (state *translator) holders(all []*candidate) []v1alpha1.Holder {
	listed := state.settings.holders.all
	list, room, served := []v1alpha1.Holder{}, v1alpha1.MaxHeld-len(listed), vip.Set{}
	for _, candidate := range all {
		maps.Copy(served, vip.NewSet(candidate.vips()...))
	}
	for _, candidate := range all {
		vips := candidate.claims()
		if candidate.stream == nil {
			vips = slices.DeleteFunc(slices.Clone(vips), served.Has)
			maps.Copy(served, vip.NewSet(vips...))
		} else {
			has := func(held vip.VIP) bool { return state.lacks(held) == nil }
			vips = slices.Concat(vips, slices.DeleteFunc(slices.Clone(candidate.reserved), has))
		}
		vips = slices.DeleteFunc(vips, func(held vip.VIP) bool {
			if !listed.Has(held) {
				room--
			}
			return !listed.Has(held) && room < 0
		})
		if len(vips) > 0 {
			service := candidate.service
			list = append(list, v1alpha1.Holder{
				Namespace: service.Namespace, Name: service.Name, UID: service.UID, VIPs: vip.Texts(vips),
			})
		}
	}
	slices.SortFunc(list, func(a, b v1alpha1.Holder) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name), cmp.Compare(a.UID, b.UID))
	})
	return list
}
