package translation

import (
	"cmp"
	"fmt"
	"maps"
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
	for _, s := range all {
		if name := s.Labels[discoveryv1.LabelServiceName]; name != "" {
			l := label{s.Namespace, discoveryv1.LabelServiceName, name}
			byService[l] = append(byService[l], s)
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
func (t *translator) sliceEndpoints(s *corev1.Service) []*endpoint {
	byName := map[string]*endpoint{}
	holders := map[netip.Addr]string{}
	for _, slice := range t.slices[label{s.Namespace, discoveryv1.LabelServiceName, s.Name}] {
		if slice.DeletionTimestamp != nil {
			continue
		}
		object := corev1.ObjectReference{
			APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice",
			Namespace: slice.Namespace, Name: slice.Name, UID: slice.UID,
		}
		translates := translatedPort(s, slice)
		for _, x := range slice.Endpoints {
			if len(x.Addresses) == 0 {
				continue
			}
			text := x.Addresses[0] // the API defines the addresses as equivalent
			name := strings.ReplaceAll(text, ":", "-")
			if x.TargetRef != nil && x.TargetRef.Name != "" {
				name = x.TargetRef.Name
			}
			e := byName[name]
			if e == nil {
				e = &endpoint{object: object, name: name}
				byName[name] = e
			}
			isTrue := func(p *bool, otherwise bool) bool { return p == nil && otherwise || p != nil && *p }
			terminating := isTrue(x.Conditions.Terminating, false)
			e.terminating = e.terminating || terminating
			ready := isTrue(x.Conditions.Ready, true) && isTrue(x.Conditions.Serving, true)
			if !ready && !terminating && !s.Spec.PublishNotReadyAddresses {
				continue
			}
			e.ready = true
			if translates != "" {
				e.problem(ReasonPortTranslation, "EndpointSlice %s: %s", slice.Name, translates)
				continue
			}
			a, err := netip.ParseAddr(text)
			problem := "is no IP address: write one"
			if err == nil {
				problem = t.settings.refuses(a)
			}
			if problem != "" {
				e.problem(ReasonAddressRefused, "EndpointSlice %s has address %q, which %s", slice.Name, text, problem)
				continue
			}
			holder, taken := holders[a]
			if at := &e.ips[vip.FamilyOf(a)]; taken && holder != name || at.IsValid() && *at != a {
				e.problem(ReasonAddressTaken, "EndpointSlice %s has address %s of %s, which has another one of that family, "+
					"or the address belongs to another endpoint: remove one of them", slice.Name, a, name)
			} else {
				*at, holders[a] = a, name
			}
		}
	}
	var list []*endpoint
	for _, name := range slices.Sorted(maps.Keys(byName)) {
		list = append(list, byName[name])
	}
	return list
}

// translatedPort returns the problem of a slice whose ports differ from the Service, or "".
func translatedPort(s *corev1.Service, slice *discoveryv1.EndpointSlice) string {
	for _, p := range slice.Ports {
		for _, q := range s.Spec.Ports {
			if p.Port == nil || p.Name != nil && *p.Name != q.Name && len(s.Spec.Ports) > 1 {
				continue
			}
			if *p.Port != q.Port && (p.Protocol == nil || *p.Protocol == protocol(q.Protocol)) {
				return fmt.Sprintf("port %d of the Service is %d there, and vipgate does not translate ports: "+
					"let the application listen on port %d", q.Port, *p.Port, q.Port)
			}
		}
	}
	return ""
}
