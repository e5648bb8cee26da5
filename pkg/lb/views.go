package lb

import (
	"net/netip"

	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/targetset"
)

// view is one address of a target for people.
func (a *aggregate) view(s *stream, m *targetset.Member, ip netip.Addr) targetset.View {
	h, known := a.healthOf(s, m, ip)
	if !known {
		h.State = healthcheck.Starting
	}
	v := targetset.View{Health: h, Checks: h.State, Origins: m.Origins, Owner: m.Owner}
	v.Key = healthcheck.Key{Stream: s.Name, Name: m.Name, Addr: ip}
	if m.Draining != healthcheck.Ready {
		v.State, v.DrainEnd, v.DrainCause = m.Draining, m.DrainEnd, m.Cause
	}
	return v
}

// views are the targets of a stream for people.
func (a *aggregate) views(name string) []targetset.View {
	s, ok := a.streams[name]
	if !ok {
		return nil
	}
	var views []targetset.View
	for i := range s.members {
		for _, ip := range s.members[i].IPs {
			views = append(views, a.view(s, &s.members[i], ip))
		}
	}
	return views
}

// viewsOf are the addresses of the targets of these names, of which several share
// one while one of them leaves. It looks at each target of the stream once.
func (a *aggregate) viewsOf(stream string, names map[string]struct{}) []targetset.View {
	s, ok := a.streams[stream]
	if !ok {
		return nil
	}
	var views []targetset.View
	for i := range s.members {
		m := &s.members[i]
		if _, wanted := names[m.Name]; wanted {
			for _, ip := range m.IPs {
				views = append(views, a.view(s, m, ip))
			}
		}
	}
	return views
}

// keys are the addresses of the streams that changes name, as they were before.
func (a *aggregate) keys(changes targetset.Changes) map[healthcheck.Key]struct{} {
	keys := map[healthcheck.Key]struct{}{}
	add := func(name string) {
		s, ok := a.streams[name]
		if !ok {
			return
		}
		for _, m := range s.members {
			for _, ip := range m.IPs {
				keys[healthcheck.Key{Stream: name, Name: m.Name, Addr: ip}] = struct{}{}
			}
		}
	}
	for _, s := range changes.Streams {
		add(s.Name)
	}
	for _, name := range changes.Removed {
		add(name)
	}
	return keys
}
