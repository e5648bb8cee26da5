package translation_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"pgregory.net/rapid"

	"github.com/vipgate/vipgate/pkg/kube/translation"
	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
	"github.com/vipgate/vipgate/pkg/trench"
)

// heavyCheck has 40 checks a second of each target.
const heavyCheck = `{"all":[{"tcp":{"port":1}},{"tcp":{"port":2}},{"tcp":{"port":3}},{"tcp":{"port":4}}],` +
	`"interval":"100ms","timeout":"100ms"}`

// A refused edit takes nothing from the Service, also in a namespace that is over its quota.
func TestEditInFullNamespace(t *testing.T) {
	check := func(text string) string { return ", vipgate.io/check: '" + text + "'" }
	for _, c := range []struct {
		quota, edit, want string
		accepted          bool
	}{
		{"{streams: 2}", "", "s0 s1", true},
		{"{streams: 2}", check(`{"tcp":{"port":8080},"interval":"2s"}`), "s0 s1", true},
		{"{streams: 2}", check("bad"), "s0 s1", false},
		{"{streams: 2}", `, vipgate.io/maglev: '{"size":2017}'`, "s0 s1", false},
		{"{streams: 4}", `, vipgate.io/maglev: '{"size":2017}'`, "s0 s1 s2", true},
		{"{targets: 6}", check(heavyCheck), "s0 s1 s2", false},
		{"{targets: 83}", check(heavyCheck), "s0 s1 s2", false},
		{"{targets: 84}", check(heavyCheck), "s0 s1 s2", true},
		{"{targets: 6}", `, vipgate.io/min-ready: "2"`, "s0 s1 s2", true},
		{"{targets: 6}", `, vipgate.io/min-ready: "3"`, "s0 s1 s2", false},
		{"{targets: 7}", `, vipgate.io/min-ready: "3"`, "s0 s1 s2", true},
	} {
		o := quoted(t, "other", "quota: "+c.quota, c.edit, "", "")
		accept(t, o)
		r := translation.Translate(o, options)
		got := strings.Join(slices.Sorted(maps.Keys(served(r))), " ")
		if v := r.Services[0]; strings.ReplaceAll(got, "other.", "") != c.want || v.Accepted != c.accepted || v.Targets != 2 {
			t.Errorf("%+v: %s", c, r.Table())
		}
	}
}

// A stream keeps the targets that it needs to be ready, also of a quota that is lower than these.
func TestQuotaKeepsMinReady(t *testing.T) {
	for quota, want := range map[int]string{1: "2 1", 2: "2 1", 3: "2 1", 4: "2 2"} {
		o := quoted(t, "other", fmt.Sprintf("quota: {targets: %d}", quota), "", "")
		accept(t, o)
		o.Services[0].Annotations[v1alpha1.MinReadyAnnotation] = "2"
		o.Services[0].Status.Conditions[0].Message = translation.Record(o.Services[0])
		r := translation.Translate(o, options)
		if got := fmt.Sprint(r.Services[0].Targets, r.Services[1].Targets); got != want {
			t.Errorf("quota %d: %s targets, want %s", quota, got, want)
		}
	}
}

// crowded returns an input of three namespaces, each with count Services that hold a VIP.
func crowded(t *testing.T, count int) translation.Objects {
	t.Helper()
	template := read(t, []byte(tenant("x", "x", "2026-01-01T00:00:00Z", "x: z", ""))).Services[0]
	o := read(t, []byte(strings.Replace(shared(subnets, ""), "[trench-a, other]", "[trench-a, a, b, c]", 1)))
	var vips, holders []any
	for position, namespace := range []string{"a", "b", "c"} {
		for i := range count {
			address := fmt.Sprintf("20.1.%d.%d", position, i)
			vips = append(vips, address+"/32")
			s := template.DeepCopy()
			s.Namespace, s.Name, s.UID = namespace, fmt.Sprint("s", i), types.UID(fmt.Sprint(namespace, "-s", i))
			s.Annotations["vipgate.io/vips"] = address
			s.Status.Conditions = []metav1.Condition{{Type: "vipgate.io/LastAccepted", Message: translation.Record(s)}}
			holders = append(holders, map[string]any{
				"namespace": namespace, "name": s.Name, "uid": string(s.UID), "vips": []any{address + "/32"},
			})
			o.Services = append(o.Services, s)
		}
	}
	o.Trench.Object["spec"].(map[string]any)["attractor"].(map[string]any)["vips"] = vips
	o.Trench.Object["status"] = map[string]any{"holders": holders}
	return o
}

// A Service that has no stream for a while keeps its place among all, and returns to it.
func TestParkedServiceKeepsItsPlace(t *testing.T) {
	for _, parked := range []bool{true, false} {
		o := crowded(t, 200)
		for _, s := range o.Services {
			if s.Namespace == "a" && parked {
				s.Spec.Ports[0].TargetPort.IntVal = 1 // refused
				s.Status.Conditions[0].Message = translation.Record(s)
			}
		}
		count := map[string]int{}
		for name := range served(translation.Translate(o, options)) {
			count[name[:1]]++
		}
		want := map[bool]string{true: "map[b:200]", false: "map[a:200 b:200]"}[parked]
		if got := fmt.Sprint(count); got != want {
			t.Errorf("parked %t: %s, want %s", parked, got, want)
		}
	}
}

// The targets of all other namespaces have a limit. Those that serve come first, of whatever age.
func TestQuotaOfAllTargets(t *testing.T) {
	for _, c := range []struct {
		quota   string
		a, b, c int // targets; those of b are new
		want    string
	}{
		{"{}", 400, 199, 400, "400 199 400"},
		{"{}", 400, 200, 400, "400 200 400"},
		{"{}", 400, 201, 400, "400 200 400"},
		{"{}", 500, 500, 499, "500 1 499"},
		{"{}", 500, 9, 501, "500 1 499"},
		{"{targets: 1200}", 500, 400, 500, "500 200 500"},
	} {
		o := crowded(t, 1)
		pod := read(t, []byte(attached("a", "web-0", "172.16.0.1"))).Pods[0]
		for position, count := range []int{c.a, c.b, c.c} {
			var names []string
			for i := range count {
				p := pod.DeepCopy()
				p.Namespace, p.Name = o.Services[position].Namespace, fmt.Sprintf("web-%03d", i)
				p.Annotations["k8s.v1.cni.cncf.io/network-status"] = fmt.Sprintf(
					`[{"name":"trench-a/targets","ips":["172.16.%d.%d"]}]`, 10*position+i/250, i%250+1)
				o.Pods, names = append(o.Pods, p), append(names, p.Name)
			}
			if s := o.Services[position]; s.Namespace != "b" {
				s.Status.Conditions = append(s.Status.Conditions, metav1.Condition{
					Type: "vipgate.io/Generations", Message: translation.Generations(s, names, time.Unix(1, 0)),
				})
			}
		}
		o.Trench.Object["spec"].(map[string]any)["quota"] = read(t, []byte(strings.Replace(shared("", ""), "spec:\n",
			"spec:\n  quota: "+c.quota+"\n", 1))).Trench.Object["spec"].(map[string]any)["quota"]
		r := translation.Translate(o, options)
		got := fmt.Sprint(r.Services[0].Targets, r.Services[1].Targets, r.Services[2].Targets)
		if got != c.want || !r.Trench.Accepted {
			t.Errorf("%+v: %s", c, got)
		}
	}
}

// An edit that fills the trench file leaves the Service its last form.
func TestEditFillsFile(t *testing.T) {
	o := quoted(t, "other", "quota: {targets: 1000000}", "", "")
	o.Services[0].Spec.Selector["old"], o.Pods[0].Labels["old"] = "yes", "yes"
	accept(t, o)
	delete(o.Services[0].Spec.Selector, "old")
	for i := range 50_000 {
		pod := o.Pods[1].DeepCopy()
		pod.Name = fmt.Sprintf("web-%054d", i)
		pod.Annotations["k8s.v1.cni.cncf.io/network-status"] = fmt.Sprintf(
			`[{"name":"trench-a/targets","ips":["172.16.%d.%d"]}]`, 10+i/256, i%256)
		o.Pods = append(o.Pods, pod)
	}
	r := translation.Translate(o, options)
	if v := r.Services[0]; len(served(r)) != 2 || v.Accepted || v.Targets != 1 || v.Reason != "QuotaExceeded" {
		t.Error(r.Table()[:min(3000, len(r.Table()))])
	}
}

// An edit that fills the trench file takes no room from a larger namespace.
func TestEditFillsFileOfOthers(t *testing.T) {
	o := crowded(t, 1)
	o.Services, o.Pods = o.Services[:2], read(t, []byte(attached("a", "web-0", "172.16.0.1"))).Pods
	o.Trench.Object["spec"].(map[string]any)["quota"] = map[string]any{"targets": int64(1_000_000)}
	for i := range 90_000 {
		pod := o.Pods[0].DeepCopy()
		pod.Namespace, pod.Name = map[bool]string{true: "a", false: "b"}[i < 50_000], fmt.Sprintf("web-%054d", i)
		pod.Annotations["k8s.v1.cni.cncf.io/network-status"] = fmt.Sprintf(
			`[{"name":"trench-a/targets","ips":["172.16.%d.%d"]}]`, i/256%256, i%256)
		o.Pods = append(o.Pods, pod)
	}
	o.Services[1].Spec.Selector["old"] = "yes"
	o.Services[1].Status.Conditions[0].Message = translation.Record(o.Services[1])
	delete(o.Services[1].Spec.Selector, "old")
	r := translation.Translate(o, options)
	if v := r.Services[1]; len(served(r)) != 2 || v.Accepted || v.Targets != 0 {
		t.Error(r.Table()[:min(3000, len(r.Table()))])
	}
}

// The last form of a Service keeps its Pods, although no present selector has its label.
func TestLastFormWithAnotherLabel(t *testing.T) {
	o := quoted(t, "other", "quota: {targets: 1000000}", "", "")
	service := o.Services[0]
	service.Spec.Selector, o.Pods[0].Labels["old"] = map[string]string{"old": "yes"}, "yes"
	accept(t, o)
	service.Spec.Selector, service.Annotations["vipgate.io/check"] = map[string]string{"app": "web"}, "{"
	r := translation.Translate(o, options)
	if v := r.Services[0]; len(served(r)) != 2 || v.Accepted || v.Targets != 1 {
		t.Error(r.Table())
	}
}

// VIPs beyond a full list of holders push none out of it, of whatever age.
func TestFullListOfHolders(t *testing.T) {
	for _, more := range []int{-1, 0, 1} {
		o := read(t, []byte(shared(subnets, "")+tenant("trench-a", "many", "2026-01-01T00:00:00Z", "", "")+
			tenant("trench-a", "web", "2026-01-03T00:00:00Z", "vipgate.io/vips: 20.0.0.1", "")))
		vips, listed := []any{"20.0.0.1/32"}, []any{}
		var texts []string
		for i := range v1alpha1.MaxHeld + more {
			texts = append(texts, fmt.Sprintf("20.1.%d.%d/32", i/256, i%256))
			if vips = append(vips, texts[i]); len(listed) < v1alpha1.MaxHeld-1 {
				listed = append(listed, texts[i])
			}
		}
		o.Services[0].Annotations = map[string]string{v1alpha1.VIPsAnnotation: strings.Join(texts, ",")}
		o.Trench.Object["spec"].(map[string]any)["attractor"].(map[string]any)["vips"] = vips
		o.Trench.Object["status"] = map[string]any{"holders": []any{
			map[string]any{"namespace": "trench-a", "name": "many", "uid": "trench-a-many", "vips": listed},
			map[string]any{"namespace": "trench-a", "name": "web", "uid": "trench-a-web", "vips": []any{"20.0.0.1/32"}},
		}}
		list := translation.Translate(o, options).Holders
		if len(list) != 2 || len(list[0].VIPs) != v1alpha1.MaxHeld-1 || list[1].Name != "web" {
			t.Errorf("%d more VIPs: %d holders, %d of the first", more, len(list), len(list[0].VIPs))
		}
	}
}

// world is a Trench whose leader writes each result, with Services of three namespaces.
type world struct {
	o      translation.Objects
	quota  [2]int // streams, targets
	now    time.Time
	result translation.Result
}

// translate returns a line for each Service: its VIPs, targets and check.
func (w *world) translate(t *rapid.T) map[string]string {
	w.result = translation.Translate(w.o, options)
	if !w.result.Trench.Accepted {
		t.Fatal(w.result.Trench.Message)
	}
	states, streams := map[string]string{}, map[string]trench.Stream{}
	used := map[string][2]int{} // tables and checks a second
	for _, s := range w.result.Config.Streams {
		streams[s.Name] = s
	}
	for _, v := range w.result.Services {
		if s, ok := streams[v.Stream]; ok {
			states[v.Object.Namespace+"/"+v.Object.Name] = fmt.Sprintf("%v %v %+v %d %d", s.VIPs, v.Names, s.Check,
				s.Maglev.Size, s.MinReady)
			rate, tables := time.Duration(0), max(1, (int(s.Maglev.Size)+1008)/1009)
			complete := s.Complete()
			members, _ := complete.Check.Members()
			for _, member := range members {
				rate += time.Second / member.FastInterval
			}
			for _, scope := range []string{v.Object.Namespace, ""} {
				used[scope] = [2]int{used[scope][0] + tables, used[scope][1] + len(v.Names)*int(rate)}
			}
		}
	}
	for scope, sum := range used {
		limits := w.quota
		if scope == "" {
			limits = [2]int{v1alpha1.MaxStreams, v1alpha1.MaxTargets}
		}
		if sum[0] > limits[0] || sum[1] > limits[1] {
			t.Fatalf("namespace %q has %d tables, %d checks a second\n%s", scope, sum[0], sum[1], w.result.Table())
		}
	}
	return states
}

// accepted reports whether the present form of a Service is accepted.
func (w *world) accepted(name string) bool {
	return slices.ContainsFunc(w.result.Services, func(v translation.ServiceVerdict) bool {
		return v.Accepted && v.Object.Namespace+"/"+v.Object.Name == name
	})
}

// write records the result in the status of the objects, as the leader does.
func (w *world) write() {
	w.now = w.now.Add(time.Minute)
	var holders []any
	for _, h := range w.result.Holders {
		var vips []any
		for _, text := range h.VIPs {
			vips = append(vips, text)
		}
		holders = append(holders, map[string]any{
			"namespace": h.Namespace, "name": h.Name, "uid": string(h.UID), "vips": vips,
		})
	}
	w.o.Trench.Object["status"] = map[string]any{"holders": holders}
	for _, v := range w.result.Services {
		s := w.o.Services[slices.IndexFunc(w.o.Services, func(s *corev1.Service) bool { return s.UID == v.Object.UID })]
		conditions := map[string]string{}
		for _, c := range s.Status.Conditions {
			conditions[c.Type] = c.Message
		}
		if v.Accepted {
			conditions["vipgate.io/LastAccepted"] = translation.Record(s)
		}
		if delete(conditions, "vipgate.io/Generations"); v.Stream != "" {
			conditions["vipgate.io/Generations"] = translation.Generations(s, v.Names, w.now)
		}
		s.Status.Conditions = nil
		for kind, message := range conditions {
			s.Status.Conditions = append(s.Status.Conditions, metav1.Condition{Type: kind, Message: message})
		}
	}
}

// No sequence of edits by one namespace takes the VIPs, the targets or the stream of another one's
// Service, of a Service beside it, or, if the edit is refused, of the edited one. The quotas hold.
func TestEditsTakeNothing(t *testing.T) {
	base := crowded(t, 3)
	pod := read(t, []byte(attached("a", "web-0", "172.16.0.1"))).Pods[0]
	var vips []any
	for position, namespace := range []string{"a", "b", "c"} {
		for i := range 6 {
			p := pod.DeepCopy()
			p.Namespace, p.Name = namespace, fmt.Sprint("web-", i)
			p.Labels["half"] = fmt.Sprint(i % 2)
			p.Annotations["k8s.v1.cni.cncf.io/network-status"] = fmt.Sprintf(
				`[{"name":"trench-a/targets","ips":["172.16.%d.%d"]}]`, position, i+1)
			base.Pods = append(base.Pods, p)
			vips = append(vips, fmt.Sprintf("20.1.%d.%d/32", position, i))
		}
	}
	spec := base.Trench.Object["spec"].(map[string]any)
	spec["attractor"].(map[string]any)["vips"] = vips
	edits := map[string][]string{
		v1alpha1.CheckAnnotation: {
			"", "bad", `{"tcp":{"port":1}}`, heavyCheck, strings.Replace(heavyCheck, "100", "200", 1),
			`{"http":{"port":1,"body":"a"}}`, `{"any":[{"http":{"port":1,"body":"a"}},{"tcp":{"port":2}}]}`,
			`{"tcp":{"port":1},"fastInterval":"100ms","timeout":"100ms"}`,
		},
		v1alpha1.MaglevAnnotation:   {"", `{"size":2017}`, `{"size":131071}`, `{"size":65537}`},
		v1alpha1.MinReadyAnnotation: {"", "1", "3", "100", "x"},
		v1alpha1.VIPsAnnotation:     {"", "20.1.0.0", "20.1.0.4,20.1.1.4", "20.1.2.5", "20.1.1.1", "20.9.9.9"},
	}
	rapid.Check(t, func(t *rapid.T) {
		w := &world{now: time.Unix(1e9, 0)}
		w.o.Trench, w.o.Pods = base.Trench.DeepCopy(), nil
		for _, p := range base.Pods {
			w.o.Pods = append(w.o.Pods, p.DeepCopy())
		}
		for _, s := range base.Services {
			s = s.DeepCopy()
			s.CreationTimestamp = metav1.Unix(rapid.Int64Range(0, 9).Draw(t, "age"), 0)
			// Together they may pass a quota that was lowered.
			s.Annotations[v1alpha1.MaglevAnnotation] = rapid.SampledFrom([]string{
				"{}", `{"size":101}`, `{"size":65537}`, `{"size":131071}`,
			}).Draw(t, "table")
			s.Status.Conditions[0].Message = translation.Record(s)
			w.o.Services = append(w.o.Services, s)
		}
		w.quota = rapid.SampledFrom([][2]int{{200, 500}, {200, 500}, {131, 9}, {2, 9}, {3, 6}, {3, 100}}).Draw(t, "quota")
		w.o.Trench.Object["spec"].(map[string]any)["quota"] = map[string]any{
			"streams": int64(w.quota[0]), "targets": int64(w.quota[1]),
		}
		before := w.translate(t)
		w.write()
		for range rapid.IntRange(1, 6).Draw(t, "steps") {
			s := w.o.Services[rapid.IntRange(0, len(w.o.Services)-1).Draw(t, "service")]
			edited, grown := s.Namespace+"/"+s.Name, ""
			kinds := []string{"annotation", "annotation", "selector", "port", "pods"}
			switch rapid.SampledFrom(kinds).Draw(t, "edit") {
			case "annotation":
				name := rapid.SampledFrom(slices.Sorted(maps.Keys(edits))).Draw(t, "annotation")
				s.Annotations[name] = rapid.SampledFrom(edits[name]).Draw(t, "value")
				if s.Annotations[name] == "" {
					delete(s.Annotations, name)
				}
			case "selector":
				s.Spec.Selector = rapid.SampledFrom([]map[string]string{
					{"app": "web"}, {"app": "web", "half": "0"}, {"app": "none"},
				}).Draw(t, "selector")
			case "port":
				s.Spec.Ports[0].TargetPort = rapid.SampledFrom([]intstr.IntOrString{
					intstr.FromInt32(8080), intstr.FromInt32(1), intstr.FromString("web"),
				}).Draw(t, "port")
			case "pods":
				grown = s.Namespace
				ready := rapid.SampledFrom([]corev1.ConditionStatus{"True", "False"}).Draw(t, "ready")
				for _, p := range w.o.Pods {
					if p.Namespace == grown && rapid.Bool().Draw(t, "changes") {
						p.Status.Conditions[0].Status = ready
					}
				}
			}
			accepted := map[string]bool{}
			for name := range before {
				accepted[name] = w.accepted(name)
			}
			after := w.translate(t)
			for name, state := range before {
				same := after[name] == state || name == edited && w.accepted(name) || strings.HasPrefix(name, grown+"/")
				if !same && (!w.accepted(name) || accepted[name]) {
					t.Fatalf("an edit of %s takes from %s: %s became %q, %s", edited, name, state, after[name], w.result.Table())
				}
			}
			w.write()
			before = w.translate(t) // others may grow
			w.write()
		}
	})
}

// Earlier sets of targets that the quota leaves out are not in the trench file.
func TestEarlierOfLimitedTargets(t *testing.T) {
	for quota, want := range map[int]int{1: 1, 2: 2, 3: 2} {
		o := quoted(t, "other", fmt.Sprintf("quota: {targets: %d}", quota), "")
		accept(t, o)
		o.Services[0].Status.Conditions[1].Message = `{"current":{"targets":[["web-0"],null]},"earlier":[` +
			`{"targets":[["web-0","web-1"],null]},{"targets":[["web-1"],null]}]}`
		r := translation.Translate(o, options)
		if got := len(r.Config.Streams[0].Earlier); got != want {
			t.Errorf("quota %d: %d earlier sets, want %d", quota, got, want)
		}
	}
}

// A rollout keeps the places of its Service, although Pods of an older one wait for places.
func TestRolloutKeepsPlaces(t *testing.T) {
	for terminating := range 4 {
		o := quoted(t, "other", "quota: {targets: 5}", "", "")
		o.Services[1].Spec.Selector = map[string]string{"app": "new"}
		accept(t, o)
		for i := range 7 {
			pod := o.Pods[0].DeepCopy()
			pod.Name, pod.Labels["app"] = fmt.Sprint("new-", i), "new"
			pod.Annotations["k8s.v1.cni.cncf.io/network-status"] = fmt.Sprintf(
				`[{"name":"trench-a/targets","ips":["172.16.1.%d"]}]`, i)
			if i < terminating {
				pod.DeletionTimestamp = &metav1.Time{}
			}
			if i >= 3+terminating {
				pod.Labels["app"] = "web" // waits
			}
			o.Pods = append(o.Pods, pod)
		}
		o.Services[1].Status.Conditions[1].Message = `{"current":{"targets":[["new-0","new-1","new-2"],null]}}`
		r := translation.Translate(o, options)
		if got := fmt.Sprint(r.Services[0].Targets, " ", r.Services[1].Targets); got != "2 3" {
			t.Errorf("%d terminating: %s\n%s", terminating, got, r.Table())
		}
	}
}

// A Service without a record takes no targets that serve from those that have one.
func TestQuotaWithoutRecord(t *testing.T) {
	for quota, want := range map[int]string{6: "0 2 2", 7: "2 2 2"} {
		o := quoted(t, "other", fmt.Sprintf("quota: {targets: %d}", quota), `, vipgate.io/min-ready: "3"`, "", "")
		accept(t, o)
		o.Services[0].Status.Conditions = o.Services[0].Status.Conditions[1:]
		r := translation.Translate(o, options)
		if got := fmt.Sprint(r.Services[0].Targets, r.Services[1].Targets, r.Services[2].Targets); got != want {
			t.Errorf("quota %d: %s, want %s\n%s", quota, got, want, r.Table())
		}
	}
}

// A Service that has no room takes no place of a younger one that serves, such as after a third one
// left.
func TestServingKeepsItsPlace(t *testing.T) {
	for serving, want := range map[int]string{0: "other.s0 other.s1", 1: "other.s0 other.s1", 2: "other.s0 other.s2"} {
		o := quoted(t, "other", "quota: {streams: 2}", "", "", "")
		accept(t, o)
		for i, service := range o.Services[1:] {
			if i+1 != serving {
				service.Status.Conditions = service.Status.Conditions[:1]
			}
		}
		got := strings.Join(slices.Sorted(maps.Keys(served(translation.Translate(o, options)))), " ")
		if got != want {
			t.Errorf("s0 and s%d serve: %s, want %s", serving, got, want)
		}
	}
}

// A subnet of another family withdraws no VIP: the last form of a Service keeps the targets that
// make it ready. Edits and new Services pass no quota.
func TestQuotaOfNewFamily(t *testing.T) {
	for _, c := range []struct {
		quota    int
		edit     string // min-ready of s1
		want     string
		accepted bool
	}{
		{12, "2", "2 2 2", true},
		{11, "2", "2 2 0", true},
		{8, "2", "2 2 0", true},
		{7, "2", "2 2 0", true},
		{4, "2", "2 2 0", true},
		{3, "2", "2 2 0", true},
		{3, "x", "2 2 0", false},
		{2, "2", "2 0 0", false},
		{1, "2", "0 0 0", false},
		{7, "1", "2 2 0", false},
		{8, "1", "2 2 0", true},
		{9, "3", "2 2 0", false},
		{10, "3", "2 2 0", true},
	} {
		o := quoted(t, "other", fmt.Sprintf("quota: {targets: %d}", c.quota), "", "", "")
		accept(t, o)
		for _, service := range o.Services[:2] {
			service.Annotations[v1alpha1.MinReadyAnnotation] = "2"
			service.Status.Conditions[0].Message = translation.Record(service)
		}
		o.Services[1].Annotations[v1alpha1.MinReadyAnnotation] = c.edit
		o.Services[2].Status.Conditions = nil
		status := o.Trench.Object["status"].(map[string]any)
		status["holders"] = status["holders"].([]any)[:2]
		spec := o.Trench.Object["spec"].(map[string]any)
		spec["network"].(map[string]any)["subnets"] = []any{"172.16.0.0/16", "fd00::/64"}
		r := translation.Translate(o, options)
		got := fmt.Sprint(r.Services[0].Targets, r.Services[1].Targets, r.Services[2].Targets)
		if got != c.want || r.Services[1].Accepted != c.accepted {
			t.Errorf("%+v: %s\n%s", c, got, r.Table())
		}
	}
}

// A new Service without a place is refused before its Pods are visited.
func TestQuotaBeforePods(t *testing.T) {
	for quota, want := range map[int]string{1: "QuotaExceeded", 2: "PortTranslation"} {
		o := quoted(t, "other", fmt.Sprintf("quota: {streams: %d}", quota), "", "", "")
		o.Services = o.Services[1:] // s2 has its VIP
		o.Services[0].Spec.Ports[0].TargetPort = intstr.FromString("none")
		r := translation.Translate(o, options)
		if got := r.Services[0].Reason; got != want || r.Services[1].Stream == "" {
			t.Errorf("quota %d: %s, want %s", quota, got, want)
		}
	}
}
