package translation

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/vipgate/vipgate/pkg/vip"
)

// readSlices returns the EndpointSlices of each Service, sorted by name.
func readSlices(all []*discoveryv1.EndpointSlice) map[label][]*discoveryv1.EndpointSlice {
	byService := map[label][]*discoveryv1.EndpointSlice{}
	for _, slice := range all {
		if name := slice.Labels[discoveryv1.LabelServiceName]; name != "" {
			index := label{slice.Namespace, discoveryv1.LabelServiceName, name}
			byService[index] = append(byService[index], slice)
		}
	}
	for _, list := range byService {
		slices.SortFunc(list, func(a, b *discoveryv1.EndpointSlice) int {
			return cmp.Or(cmp.Compare(a.Name, b.Name), Older(a, b))
		})
	}
	return byService
}

// sliceEndpoints returns the endpoints of a Service without a selector, sorted by name. Entries of
// several slices for one object, such as its addresses of both families, are merged.
func (state *translator) sliceEndpoints(service *corev1.Service) []*endpoint {
	byKey, namesakes := map[string]*endpoint{}, map[string]int{}
	holders := map[netip.Addr]string{} // the keys of endpoints
	// The API defines the meaning of a missing condition: ready and serving, not terminating.
	isTrue := func(condition *bool, otherwise bool) bool {
		return condition == nil && otherwise || condition != nil && *condition
	}
	// The address of a terminating or lost endpoint may belong to a new one, so ready ones come first.
	for _, usable := range []bool{true, false} {
		for _, slice := range state.slices[label{service.Namespace, discoveryv1.LabelServiceName, service.Name}] {
			if slice.DeletionTimestamp != nil {
				continue
			}
			object := corev1.ObjectReference{
				APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice",
				Namespace: slice.Namespace, Name: slice.Name, UID: slice.UID,
			}
			translates := translatedPort(service, slice)
			for _, entry := range slice.Endpoints {
				terminating := isTrue(entry.Conditions.Terminating, false)
				ready := isTrue(entry.Conditions.Ready, true) && isTrue(entry.Conditions.Serving, true)
				if len(entry.Addresses) == 0 || usable != (ready && !terminating) {
					continue
				}
				text := entry.Addresses[0] // the API defines the addresses as equivalent
				key, name := text, strings.ReplaceAll(text, ":", "-")
				if named := entry.TargetRef; named != nil && named.Name != "" {
					key, name = named.Kind+"/"+named.Namespace+"/"+named.Name, named.Name
				}
				// A Pod with addresses of both families is in two slices, one for each address type.
				found := byKey[key]
				if found == nil {
					found = &endpoint{name: name}
					byKey[key] = found
					namesakes[name]++
				}
				found.object = object
				found.terminating = found.terminating || terminating
				if !ready && !terminating && !service.Spec.PublishNotReadyAddresses {
					continue
				}
				// One ready entry suffices, because entries for one object are merged.
				found.ready = true
				if translates != "" {
					found.problem(ReasonPortTranslation, "EndpointSlice %s: %s", slice.Name, translates)
					continue
				}
				address, err := netip.ParseAddr(text)
				problem := "is no IP address: write one"
				if err == nil {
					problem = state.settings.refuses(service.Namespace, address)
				}
				if problem != "" {
					found.problem(ReasonAddressRefused, "EndpointSlice %s has address %q, which %s", slice.Name, text, problem)
					continue
				}
				// An address identifies a target, and a target has one of a family.
				holder, taken := holders[address]
				if ofFamily := &found.ips[vip.FamilyOf(address)]; taken && holder != key || ofFamily.IsValid() &&
					*ofFamily != address {
					found.problem(ReasonAddressTaken, "EndpointSlice %s has address %s of %s, which has another one of that "+
						"family, or the address belongs to another endpoint: remove one of them", slice.Name, address, name)
				} else {
					*ofFamily, holders[address] = address, key
				}
			}
		}
	}
	var list []*endpoint
	for key, found := range byKey {
		if namesakes[found.name] > 1 { // such as db-0 of StatefulSets in two namespaces
			found.name = fileName(key)
		}
		list = append(list, found)
	}
	slices.SortFunc(list, func(a, b *endpoint) int { return cmp.Compare(a.name, b.name) })
	return list
}

// translatedPort returns the problem of a slice whose ports differ from the Service, or "".
func translatedPort(service *corev1.Service, slice *discoveryv1.EndpointSlice) string {
	for _, slicePort := range slice.Ports {
		for _, servicePort := range service.Spec.Ports {
			// The only port of a Service may have no name.
			if slicePort.Port == nil || slicePort.Name != nil && *slicePort.Name != servicePort.Name &&
				len(service.Spec.Ports) > 1 {
				continue
			}
			if *slicePort.Port != servicePort.Port && (slicePort.Protocol == nil ||
				*slicePort.Protocol == protocol(servicePort.Protocol)) {
				return fmt.Sprintf("port %d of the Service is %d there, and vipgate does not translate ports: "+
					"let the application listen on port %d", servicePort.Port, *slicePort.Port, servicePort.Port)
			}
		}
	}
	return ""
}
