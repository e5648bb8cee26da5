package translation

import (
	"encoding/json"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"

	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// maxRecord is the maximum size of a record in bytes, the API server's limit for the message of a
// condition.
const maxRecord = 32 << 10

// record is the last accepted form of the fields of a Service that define its stream. The leader
// stores it in the condition LastAccepted of the Service, so that every pod, including a new one,
// reads the same record.
type record struct {
	// Generation counts the accepted forms: Services have no metadata.generation.
	Generation               int64                `json:"generation"`
	Annotations              map[string]string    `json:"annotations"`
	Ports                    []corev1.ServicePort `json:"ports,omitempty"`
	Selector                 map[string]string    `json:"selector,omitempty"`
	PublishNotReadyAddresses bool                 `json:"publishNotReadyAddresses,omitempty"`
}

// Record returns the record of an accepted Service as JSON, or "" if it is too large.
func Record(s *corev1.Service) string {
	last, _ := recordOf(s)
	r := record{
		Generation: last.Generation, Annotations: map[string]string{}, Ports: s.Spec.Ports, Selector: s.Spec.Selector,
		PublishNotReadyAddresses: s.Spec.PublishNotReadyAddresses,
	}
	for _, name := range annotations {
		if text, ok := s.Annotations[name]; ok {
			r.Annotations[name] = text
		}
	}
	if !equality.Semantic.DeepEqual(r, last) {
		r.Generation++
	}
	text, err := json.Marshal(r)
	if err != nil || len(text) > maxRecord {
		return ""
	}
	return string(text)
}

// recordOf returns the record of a Service, and reports whether a valid one exists.
func recordOf(s *corev1.Service) (r record, ok bool) {
	for _, c := range s.Status.Conditions {
		if c.Type == v1alpha1.Group+"/"+v1alpha1.LastAccepted {
			ok = json.Unmarshal([]byte(c.Message), &r) == nil
		}
	}
	return r, ok
}

// candidate is a Service with the stream that is assigned to it.
type candidate struct {
	service  *corev1.Service
	last     *corev1.Service // the last accepted form; nil if it was never accepted
	number   int64           // generation of the accepted form
	held     vip.Set         // VIPs of the last accepted form
	refused  *refusal        // why the described stream is not assigned
	stream   *trench.Stream  // nil if no stream is assigned
	problems []Problem
}

// candidates returns each Service with the stream that it describes, or else with its last
// accepted stream, without regard to conflicts between Services. services is sorted by age,
// oldest first.
func (t *translator) candidates(services []*corev1.Service) []*candidate {
	all := make([]*candidate, len(services))
	for i, s := range services {
		c := &candidate{service: s, held: vip.Set{}}
		all[i] = c
		if r, ok := recordOf(s); ok {
			c.accepted(r)
		}
		if c.stream, c.refused = t.newStream(s); c.refused == nil {
			c.problems, c.refused = t.addTargets(s, c.stream)
		}
		if c.refused != nil {
			t.fallBack(c)
		}
	}
	return all
}

// accepted restores the last accepted form from a record.
func (c *candidate) accepted(r record) {
	last := *c.service
	last.Annotations, last.Spec.Ports, last.Spec.Selector = r.Annotations, r.Ports, r.Selector
	last.Spec.PublishNotReadyAddresses = r.PublishNotReadyAddresses
	vips, _ := parseVIPs(&last)
	c.last, c.number, c.held = &last, r.Generation, vip.NewSet(vips...)
}

// fallBack assigns a refused Service its last accepted stream, without VIPs that the Trench no
// longer has. Its targets are computed from the current Pods.
func (t *translator) fallBack(c *candidate) {
	c.stream, c.problems = nil, nil
	if c.last == nil {
		return
	}
	last := *c.last
	vips, _ := parseVIPs(&last)
	vips = slices.DeleteFunc(vips, func(v vip.VIP) bool { return t.lacks(v) != nil })
	last.Annotations = with(last.Annotations, v1alpha1.VIPsAnnotation, text(vips))
	st, refused := t.newStream(&last)
	if refused != nil {
		return
	}
	if problems, refused := t.addTargets(&last, st); refused == nil {
		c.stream, c.problems = st, problems
	}
}

func with(annotations map[string]string, name, value string) map[string]string {
	changed := map[string]string{name: value}
	for key, value := range annotations {
		if key != name {
			changed[key] = value
		}
	}
	return changed
}

// text formats VIPs as in the annotation.
func text(vips []vip.VIP) string {
	texts := make([]string, len(vips))
	for i, v := range vips {
		texts[i] = v.String()
	}
	return strings.Join(texts, ",")
}

// share assigns each VIP to one of the Services that claim it: to the Service that held it
// before, or else to the oldest. A Service that loses a VIP falls back to its last accepted
// stream. That stream may claim different VIPs, so the assignment is repeated after each change.
// It terminates, because a Service falls back only once, and then only loses VIPs.
func (t *translator) share(all []*candidate) {
	for {
		holders := map[vip.VIP]*candidate{}
		for _, c := range all {
			for _, v := range c.vips() {
				if h := holders[v]; h == nil || !h.held.Has(v) && c.held.Has(v) {
					holders[v] = c
				}
			}
		}
		taken := func(c *candidate) int {
			return slices.IndexFunc(c.vips(), func(v vip.VIP) bool { return holders[v] != c })
		}
		i := slices.IndexFunc(all, func(c *candidate) bool { return taken(c) >= 0 })
		if i < 0 {
			return
		}
		c := all[i]
		if c.refused != nil {
			c.stream.VIPs = slices.DeleteFunc(c.stream.VIPs, func(v vip.VIP) bool { return holders[v] != c })
			if len(c.stream.VIPs) == 0 {
				c.stream, c.problems = nil, nil
			}
			continue
		}
		v := c.stream.VIPs[taken(c)]
		h := holders[v].service
		c.refused = refuse(ReasonVIPHeld, "Service %s/%s has VIP %s: choose another one, or delete that Service",
			h.Namespace, h.Name, v)
		t.fallBack(c)
	}
}

// vips returns the VIPs that a candidate claims.
func (c *candidate) vips() []vip.VIP {
	if c.stream == nil {
		return nil
	}
	return c.stream.VIPs
}

// verdict returns the verdict on a candidate, and adds its stream, if any, to the trench file.
func (t *translator) verdict(c *candidate) ServiceVerdict {
	v := ServiceVerdict{Verdict: Verdict{Object: reference(c.service), Generation: c.service.Generation}}
	if st := c.stream; st != nil {
		t.settings.names[st.Name] = true
		t.streams = append(t.streams, st)
		v.Stream, v.VIPs, v.Problems = st.Name, st.VIPs, c.problems
		for _, x := range st.Targets {
			if !x.Terminating {
				v.Targets++
			}
		}
	}
	if c.refused == nil {
		v.Accepted, v.Reason = true, ReasonAccepted
		v.Message = message("serves %s as stream %s", list(v.VIPs), v.Stream)
		return v
	}
	v.Reason, v.Message = c.refused.reason, c.refused.message
	if c.stream != nil {
		v.Message = message("%.800s; serving generation %d: %s", v.Message, c.number, list(v.VIPs))
	}
	return v
}

// Warning reports whether a problem has no effect on the traffic.
func (p Problem) Warning() bool {
	switch p.Reason {
	case ReasonUnknownAnnotation, ReasonSessionAffinity, ReasonSourceRanges:
		return true
	}
	return false
}
