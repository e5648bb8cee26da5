package translation_test

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/osrg/gobgp/v4/pkg/packet/bgp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/kube/translation"
	"github.com/vipgate/vipgate/pkg/policy"
	"github.com/vipgate/vipgate/pkg/trench"
	trenchfile "github.com/vipgate/vipgate/pkg/trench/file"
	"github.com/vipgate/vipgate/pkg/vip"
)

// promised fails if a translation violates an invariant that holds for all objects.
func promised(t *testing.T, o translation.Objects) {
	t.Helper()
	r := translation.Translate(o, options)
	if (r.File != nil) != r.Trench.Accepted || r.File == nil && (r.Services != nil || r.Keys != nil) {
		t.Fatalf("Trench %+v, file:\n%s", r.Trench, r.File)
	}
	explained(t, r.Trench)
	alone := o
	alone.Services, alone.Pods, alone.EndpointSlices = nil, nil, nil
	if a := translation.Translate(alone, options); a.File != nil && r.File == nil {
		t.Fatalf("Services break the file of the Trench: %s", r.Trench.Message)
	}
	if r.File == nil {
		return
	}
	config, err := trenchfile.Parse("trench.yaml", r.File, trench.DefaultDefaults())
	if err != nil {
		t.Fatalf("%v\n%s", err, r.File)
	}
	streams := map[string]trench.Stream{}
	for _, s := range config.Streams {
		streams[s.Name] = s
	}
	holders := map[vip.VIP]string{}
	for _, v := range r.Services {
		explained(t, v.Verdict)
		s, ok := streams[v.Stream]
		ready := slices.DeleteFunc(slices.Clone(s.Targets), func(x trench.Target) bool { return x.Terminating })
		if ok != (v.Stream != "") || v.Accepted && !ok || len(ready) != v.Targets || !slices.Equal(s.VIPs, v.VIPs) {
			t.Fatalf("verdict %+v on stream %+v", v, s)
		}
		for _, x := range v.VIPs {
			if holders[x] != "" {
				t.Fatalf("%s and %s have VIP %s", holders[x], v.Stream, x)
			}
			holders[x] = v.Stream
		}
	}
}

func explained(t *testing.T, v translation.Verdict) {
	t.Helper()
	if v.Reason == "" || v.Message == "" || v.Object.Kind == "" {
		t.Fatalf("verdict without an explanation: %+v", v)
	}
	for _, p := range v.Problems {
		if p.Reason == "" || p.Message == "" || p.Object.Kind == "" {
			t.Fatalf("problem without an explanation: %+v", p)
		}
	}
}

func FuzzTranslateYAML(f *testing.F) {
	for _, a := range cases(f) {
		text := a.Files[0].Data
		if !bytes.Contains(text, []byte("kind: Trench")) {
			text = append(append(base(f), "---\n"...), text...)
		}
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		var o translation.Objects
		if err := o.Read(bytes.NewReader(text)); err == nil {
			promised(t, o)
		}
	})
}

// choices derives decisions from bytes. When no bytes are left, it selects the first alternative.
type choices struct{ bytes []byte }

func (c *choices) below(n int) int {
	if len(c.bytes) == 0 {
		return 0
	}
	b := c.bytes[0]
	c.bytes = c.bytes[1:]
	return int(b) % n
}

func pick[T any](c *choices, of ...T) T { return of[c.below(len(of))] }

// text takes one of the texts, seldom the next bytes.
func (c *choices) text(of ...string) string {
	if c.below(64) != 63 {
		return pick(c, of...)
	}
	n := min(c.below(80), len(c.bytes))
	s := string(c.bytes[:n])
	c.bytes = c.bytes[n:]
	return s
}

func (c *choices) meta(names ...string) metav1.ObjectMeta {
	m := metav1.ObjectMeta{
		Namespace: pick(c, "a", "a", "a", "b"), Name: c.text(names...), UID: types.UID(c.text("", "1")),
		CreationTimestamp: metav1.NewTime(time.Unix(int64(c.below(4)), 0)), Annotations: map[string]string{},
	}
	if c.below(5) == 4 {
		m.DeletionTimestamp = &m.CreationTimestamp
	}
	return m
}

func (c *choices) boolean() *bool {
	yes, no := true, false
	return pick(c, nil, &yes, &no)
}

func (c *choices) trench() *unstructured.Unstructured {
	attractor := map[string]any{
		"name": c.text("attractor"),
		"vips": []any{c.text("20.0.0.1/32", "20.0.0.1/32", "20.0.0.1/32", "20.0.0.0/24"), c.text("2000::1/128")},
	}
	if c.below(2) == 1 {
		attractor["gateways"] = []any{map[string]any{
			"name": c.text("gw"), "address": c.text("169.254.1.1"),
			"passwordSecret": map[string]any{"name": c.text("gw"), "key": c.text("key", "other")},
		}}
	}
	spec := map[string]any{"attractor": attractor}
	if c.below(2) == 1 {
		spec["network"] = map[string]any{"name": c.text("a/n"), "subnets": []any{c.text("172.16.0.0/16", "::/0")}}
	}
	if c.below(2) == 1 {
		spec["defaults"] = map[string]any{
			"drainTime": c.text("1s"), "minReady": pick[any](c, int64(2), 1.0), "maglev": map[string]any{"size": int64(101)},
			"check": pick(c, map[string]any{"families": c.text("ipv6")}, map[string]any{"timeout": c.text("1s", "2s")}),
		}
	}
	if c.below(3) == 2 {
		spec["streams"] = []any{map[string]any{"name": c.text("a.s"), "vips": []any{c.text("20.0.0.1/32")}}}
	}
	return &unstructured.Unstructured{Object: map[string]any{
		"metadata": map[string]any{"namespace": "a", "name": c.text("t")}, "spec": spec,
	}}
}

func (c *choices) service(class string) *corev1.Service {
	s := &corev1.Service{ObjectMeta: c.meta("s", "s2")}
	s.Annotations["vipgate.io/vips"] = c.text("20.0.0.1", "20.0.0.1,2000::1", "20.0.0.0/24", "2000::1")
	for _, name := range []string{"check", "min-ready", "drain-time", "maglev", "x"} {
		if c.below(12) == 11 {
			s.Annotations["vipgate.io/"+name] = c.text(`{"http":{"port":80,"body":"x"}}`, `{"source":["20.0.0.1"]}`,
				`{"families":"ipv4"}`, `{"a":[[[[{}]]]]}`, "1", "1s", `{"size":101}`)
		}
	}
	s.Spec.Type = pick(c, corev1.ServiceTypeLoadBalancer, corev1.ServiceTypeLoadBalancer, corev1.ServiceTypeClusterIP)
	s.Spec.LoadBalancerClass = pick(c, &class, &class, nil)
	s.Spec.Selector = pick(c, map[string]string{"app": "web"}, nil, map[string]string{"app": "web", "tier": "x"})
	s.Spec.PublishNotReadyAddresses = c.below(2) == 1
	if c.below(8) == 7 {
		s.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
	}
	for range pick(c, 1, 1, 1, 0, 2) {
		s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{
			Name: c.text("p"), Port: pick[int32](c, 80, 80, 80, 80, 53, -1, 0),
			Protocol:   pick(c, "", corev1.ProtocolUDP, corev1.ProtocolTCP),
			TargetPort: pick(c, intstr.IntOrString{}, intstr.FromInt32(80), intstr.FromString("http")),
		})
	}
	return s
}

func (c *choices) pod(trenchName string) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: c.meta("p", "p2", "p3")}
	p.Labels = map[string]string{"vipgate.io/trench": trenchName, "app": "web", "tier": c.text("x")}
	a, b := c.address(), c.address()
	status := fmt.Sprintf(`[{"name":"a/n","ips":[%q,%q]}]`, a, b)
	p.Annotations["k8s.v1.cni.cncf.io/network-status"] = c.text(status, "[]")
	ready := corev1.PodCondition{Type: corev1.PodReady, Status: pick(c, corev1.ConditionTrue, corev1.ConditionFalse)}
	p.Status = corev1.PodStatus{
		Phase:  pick(c, corev1.PodRunning, corev1.PodRunning, corev1.PodPending),
		PodIPs: []corev1.PodIP{{IP: a}, {IP: b}}, Conditions: []corev1.PodCondition{ready},
	}
	port := corev1.ContainerPort{Name: "http", ContainerPort: pick[int32](c, 80, 81)}
	p.Spec.Containers = []corev1.Container{{Ports: []corev1.ContainerPort{port}}}
	return p
}

func (c *choices) address() string {
	return c.text("172.16.0.1", "172.16.0.2", "fd00::1", "fd00::2", "20.0.0.1", "10.0.0.1", "::ffff:1.2.3.4",
		"fe80::1%x", "")
}

func (c *choices) slice() *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{ObjectMeta: c.meta("e", "e2")}
	s.Labels = map[string]string{discoveryv1.LabelServiceName: pick(c, "s", "s2")}
	for range c.below(4) {
		e := discoveryv1.Endpoint{Addresses: []string{c.address()}, Conditions: discoveryv1.EndpointConditions{
			Ready: c.boolean(), Serving: c.boolean(), Terminating: c.boolean(),
		}}
		if c.below(2) == 1 {
			e.TargetRef = &corev1.ObjectReference{Name: c.text("p", "p2", "172.16.0.1")}
		}
		s.Endpoints = append(s.Endpoints, e)
	}
	port := pick[int32](c, 80, 53)
	s.Ports = []discoveryv1.EndpointPort{{Port: pick(c, nil, &port)}}
	return s
}

func (c *choices) objects() translation.Objects {
	o := translation.Objects{Trench: c.trench()}
	name := o.Trench.GetName()
	for range 1 + c.below(4) {
		o.Services = append(o.Services, c.service("vipgate.io/"+name))
	}
	for range c.below(7) {
		o.Pods = append(o.Pods, c.pod(name))
	}
	for range c.below(3) {
		o.EndpointSlices = append(o.EndpointSlices, c.slice())
	}
	o.Secrets = []*corev1.Secret{{
		ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "gw"}, Data: map[string][]byte{"key": []byte("secret")},
	}}
	return o
}

// distinct keeps only the first object of each name, because names are unique in an API server.
func distinct[T metav1.Object](list []T) []T {
	seen := map[string]bool{}
	return slices.DeleteFunc(slices.Clone(list), func(x T) bool {
		name := x.GetNamespace() + "/" + x.GetName()
		twice := seen[name]
		seen[name] = true
		return twice
	})
}

func FuzzTranslate(f *testing.F) {
	random := rand.NewChaCha8([32]byte(bytes.Repeat([]byte("seed"), 8)))
	for n := range 50 {
		seed := make([]byte, 8*n)
		_, _ = random.Read(seed)
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		o := (&choices{data}).objects()
		promised(t, o)
		o.Services, o.Pods, o.EndpointSlices = distinct(o.Services), distinct(o.Pods), distinct(o.EndpointSlices)
		promised(t, o)
		want := translation.Translate(o, options)
		shuffle(rand.New(rand.NewPCG(1, uint64(len(data)))), o)
		got := translation.Translate(o, options)
		same := cmpopts.EquateComparable(vip.VIP{}, netip.Addr{}, trench.Members{})
		if d := cmp.Diff(want, got, same); d != "" {
			t.Fatalf("in another order: %s", d)
		}
	})
}

// FuzzAnnotations follows the annotations of a Service through all programs: kube writes the trench
// file, lb compiles the expressions of checks, and frontend encodes policies for UPDATEs. No
// annotation takes much memory, or breaks the file.
func FuzzAnnotations(f *testing.F) {
	communities := func(n int) string {
		return fmt.Sprintf(`{"ready":{"communities":["1:1"%s],"med":1,"prepend":10,"localPreference":1,"targetBandwidth":1},`+
			`"draining":{"communities":["4294967295:1:1"]}}`, strings.Repeat(`,"1:2"`, n-1))
	}
	body := func(expressions ...string) string {
		members := ""
		for _, expression := range expressions {
			text, _ := json.Marshal(expression)
			members += fmt.Sprintf(`,{"http":{"port":80,"body":%s}},{"dns":{"port":53,"name":"a","answer":%s}}`, text, text)
		}
		return `{"all":[` + strings.TrimPrefix(members, ",") + `]}`
	}
	f.Add(body("^ok"), communities(20), `{"size":101,"seed":2}`)
	f.Add(body(`"status":\s*"(UP|ok)"`, `\pL+`), communities(21), "{}")
	f.Add(body(`\Qok`), communities(1100), `{"size":131071}`)
	f.Add(body("(?:"+strings.Repeat("a", 980)+"){0,1000}"), communities(20_000), `{"size":131072}`)
	f.Add(body(strings.Repeat("a{0,1000}", 22)+"b"), "", "")
	f.Add(body(`^\pL{990}$`, `(?i)[`+strings.Repeat("B-𞥂", 330)+`]`), `{"vips":[]}`, "")
	f.Add(body("^.{0,999}", strings.Repeat("(a?)", 50)+".{0,440}"), "{}", "{}")
	f.Add(`{"any":[`+strings.TrimSuffix(strings.Repeat(`{"tcp":{"port":1}},`, 1000), ",")+`]}`, "{}", "{}")
	f.Fuzz(func(t *testing.T, check, routing, maglev string) {
		size := len(check) + len(routing) + len(maglev)
		if size > 256<<10 { // of all annotations of an object
			t.Skip()
		}
		o := read(t, base(t))
		service := &corev1.Service{ObjectMeta: metav1.ObjectMeta{
			Namespace: "trench-a", Name: "s", Annotations: map[string]string{"vipgate.io/vips": "20.0.0.1,2000::1"},
		}}
		for name, text := range map[string]string{"check": check, "policy": routing, "maglev": maglev} {
			if text != "" {
				service.Annotations["vipgate.io/"+name] = text
			}
		}
		class := "vipgate.io/trench-a"
		service.Spec = corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, LoadBalancerClass: &class, Selector: map[string]string{"app": "web"},
			Ports: []corev1.ServicePort{{Port: 80}},
		}
		o.Services = []*corev1.Service{service}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		promised(t, o)
		r := translation.Translate(o, options)
		config, err := trenchfile.Parse("trench.yaml", r.File, trench.DefaultDefaults())
		if err != nil {
			t.Fatal(err)
		}
		for _, stream := range config.Streams {
			members, _ := stream.Check.Members()
			for _, member := range members {
				for _, text := range []string{member.HTTP.Body, member.DNS.Answer} {
					expression, _ := trench.CompileBody(text)
					expression.MatchString(strings.Repeat("a", 200))
				}
			}
		}
		updates(t, config)
		runtime.ReadMemStats(&after)
		if allocated := after.TotalAlloc - before.TotalAlloc; allocated > uint64(16<<20+1000*size) {
			t.Fatalf("%d KiB for %d bytes of annotations", allocated>>10, size)
		}
	})
}

// updates fails if an UPDATE has no room for the attributes of a VIP, or is not valid.
func updates(t *testing.T, config *trench.Config) {
	t.Helper()
	for _, encoding := range []policy.Encoding{
		policy.Carried, policy.Direct(8103, 8103), policy.Direct(8103, 4200000000),
	} {
		policies, err := policy.New(config.Attractor.Policies, encoding)
		if err != nil {
			t.Fatal(err)
		}
		for _, v := range config.Attractor.VIPs {
			for reason := gate.Reason(0); reason <= gate.LastResort; reason++ {
				for _, advertisement := range []gate.Advertisement{gate.Depreferred, gate.Announced} {
					route := policies.Route(v, gate.Decision{Advertisement: advertisement, Reason: reason, Weight: 1000})
					attributes := append([]byte{0x40, 1, 1, 0, 0x40, 3, 4, 127, 0, 0, 2}, route.Attributes...)
					message := slices.Concat(bytes.Repeat([]byte{0xff}, 16), []byte{0, 0, 2, 0, 0}, []byte{0, 0}, attributes,
						[]byte{32, 20, 0, 0, 1})
					binary.BigEndian.PutUint16(message[16:], uint16(len(message)))
					binary.BigEndian.PutUint16(message[21:], uint16(len(attributes)))
					// The path, and prefixes of IPv6, take more room.
					if reserve := 100 + 4*int(route.Prepend); len(message)+reserve > bgp.BGP_MAX_MESSAGE_LENGTH {
						t.Fatalf("%s %s has %d bytes of attributes", v, reason, len(route.Attributes))
					}
					if _, err := bgp.ParseBGPMessage(message); err != nil {
						t.Fatalf("%s %s: %v", v, reason, err)
					}
				}
			}
		}
	}
}

// The generator of objects must reach the relevant cases; otherwise fuzzing does not cover them.
func TestFuzzReachesReasons(t *testing.T) {
	random := rand.NewChaCha8([32]byte(bytes.Repeat([]byte("seed"), 8)))
	reached := map[string]int{}
	for range 2000 {
		data := make([]byte, 500)
		_, _ = random.Read(data)
		o := (&choices{data}).objects()
		promised(t, o)
		r := translation.Translate(o, options)
		reached[r.Trench.Reason]++
		for _, v := range r.Services {
			reached[v.Reason]++
			for _, p := range v.Problems {
				reached[p.Reason]++
			}
			if v.Targets > 0 {
				reached["targets"]++
			}
		}
	}
	names := strings.Join(slices.Sorted(maps.Keys(reached)), " ")
	const want = "Accepted AddressRefused AddressTaken Invalid InvalidAnnotation NetworkMissing NetworkStatusMissing " +
		"NoAddressOfFamily NoCheck NoPods NotChecked PortTranslation SessionAffinity UnknownAnnotation VIPHeld " +
		"VIPNotAllowed Valid targets"
	if names != want {
		t.Errorf("reached %v, want %s", reached, want)
	}
}
