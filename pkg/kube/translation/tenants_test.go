package translation_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/vipgate/vipgate/pkg/kube/translation"
	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
	"github.com/vipgate/vipgate/pkg/trench"
	trenchfile "github.com/vipgate/vipgate/pkg/trench/file"
	"github.com/vipgate/vipgate/test/harness"
)

// tenant returns a Service of a namespace as YAML, with further annotations and a status.
func tenant(namespace, name, created, annotations, status string) string {
	return fmt.Sprintf(`---
apiVersion: v1
kind: Service
metadata: {name: %[2]s, namespace: %[1]s, uid: %[1]s-%[2]s, creationTimestamp: "%[3]s", annotations: {%[4]s}}
spec:
  type: LoadBalancer
  loadBalancerClass: vipgate.io/trench-a
  selector: {app: web}
  ports: [{port: 8080, targetPort: 8080}]
status: {%[5]s}
`, namespace, name, created, annotations, status)
}

// recorded returns a status with a record of acceptance.
func recorded(annotations string) string {
	return fmt.Sprintf(`conditions: [{type: vipgate.io/LastAccepted, status: "True", reason: Recorded, message: '%s'}]`,
		`{"generation":7,"annotations":{`+annotations+
			`},"ports":[{"port":8080,"targetPort":8080}],"selector":{"app":"web"}}`)
}

// attached returns a Pod of a namespace as YAML, with an address in the network.
func attached(namespace, name, address string) string {
	return fmt.Sprintf(`---
apiVersion: v1
kind: Pod
metadata:
  {name: %[2]s, namespace: %[1]s, labels: {app: web, vipgate.io/trench: trench-a}, annotations:
    {k8s.v1.cni.cncf.io/network-status: '[{"name":"trench-a/targets","ips":["%[3]s"]}]'}}
status: {phase: Running, conditions: [{type: Ready, status: "True"}]}
`, namespace, name, address)
}

// shared returns a Trench of two namespaces as YAML, with further fields of network and status.
func shared(network, status string) string {
	return fmt.Sprintf(`apiVersion: vipgate.io/v1alpha1
kind: Trench
metadata: {name: trench-a, namespace: trench-a}
spec:
  namespaces: [trench-a, other]
  network: {name: trench-a/targets%s}
  attractor: {name: a, vips: [20.0.0.1/32, 20.0.0.2/32, 20.0.0.3/32], gateways: [{name: g, address: 172.16.9.9}]}
status: {%s}
`, network, status)
}

const subnets = ", subnets: [172.16.0.0/16]"

// served maps each Service with a stream to its VIPs.
func served(r translation.Result) map[string]string {
	all := map[string]string{}
	for _, v := range r.Services {
		if v.Stream != "" {
			all[v.Stream] = strings.Trim(fmt.Sprint(v.VIPs), "[]")
		}
	}
	return all
}

// A Service has the fields of a check that ask a question, not those that aim it or name files. A
// record of an earlier form does not permit them.
func TestChecksOfServices(t *testing.T) {
	tls := func(kind, fields string) string { return `{"` + kind + `":{"port":1,"tls":{` + fields + `}}}` }
	for check, want := range map[string]string{
		`{"http":{"port":1,"path":"/x","host":"h","headers":["A: b"],"status":"200","body":"x"}}`: "",
		`{"dns":{"port":53,"name":"x","rcode":["NXDOMAIN"]},"rise":1,"fall":1,"warmup":"1s"}`:     "",
		tls("http", `"serverName":"x","insecure":true`):                                           "",
		`{"any":[{"http":{"port":1,"method":"HEAD"}},{"http":{"port":1,"method":"OPTIONS"}}]}`:    "",
		`{"http":{"port":1,"method":"GET"}}`:                                                      "",

		`{"tcp":{"port":1},"via":"address"}`:                                "check: via: ",
		`{"tcp":{"port":1},"source":["172.16.0.1"]}`:                        "check: source: ",
		`{"http":{"port":1,"method":"PUT"}}`:                                "check: http.method: ",
		`{"all":[{"http":{"port":1,"method":"POST"}}]}`:                     "check: all[0].http.method: ",
		tls("http", `"caFile":"/proc/1/environ"`):                           "check: http.tls.caFile: ",
		tls("grpc", `"certFile":"/a","keyFile":"/b"`):                       "check: grpc.tls.certFile: ",
		`{"any":[{"tcp":{"port":1}},` + tls("grpc", `"caFile":"/x"`) + `]}`: "check: any[1].grpc.tls.caFile: ",

		`{"tcp":{"port":1},"interval":"99999us","timeout":"9ms"}`:                               "interval: is 99999us",
		`{"tcp":{"port":1},"interval":"100ms","timeout":"9ms"}`:                                 "",
		`{"tcp":{"port":1},"interval":"101ms","timeout":"9ms"}`:                                 "",
		`{"tcp":{"port":1},"fastInterval":"99ms"}`:                                              "fastInterval: is 99ms",
		`{"all":[{"tcp":{"port":1},"interval":"+10ms","timeout":"9ms","fastInterval":"10ms"}]}`: "all[0].fastInterval",
		`{"all":[{"tcp":{"port":1},"interval":"+10ms","timeout":"9ms"}]}`:                       "all[0].interval: is +10ms",
	} {
		quoted := strings.ReplaceAll(check, `"`, `\"`)
		text := shared(subnets, "") + attached("other", "web-0", "172.16.0.1") +
			tenant("other", "web", "2026-01-01T00:00:00Z", "vipgate.io/vips: 20.0.0.1, vipgate.io/check: '"+check+"'",
				recorded(`"vipgate.io/vips":"20.0.0.1","vipgate.io/check":"`+quoted+`"`))
		v := translation.Translate(read(t, []byte(text)), options).Services[0]
		if v.Accepted != (want == "") || !strings.Contains(v.Message, want) || (v.Stream != "") != v.Accepted {
			t.Errorf("%s: stream %q, %s, want %q", check, v.Stream, v.Message, want)
		}
	}
}

// A new field of checks is allowed in annotations, or added to the refused ones.
func TestFieldsOfChecks(t *testing.T) {
	keys := map[string]bool{}
	var walk func(of reflect.Type)
	walk = func(of reflect.Type) {
		for _, field := range trench.FieldsOf(of) {
			keys[field.Key] = true
			if kind := field.Type; kind.Kind() == reflect.Struct && kind.PkgPath() == of.PkgPath() {
				walk(kind)
			}
		}
	}
	walk(reflect.TypeFor[trench.Check]())
	const want = "all answer any body caFile certFile dns expect fall families fastInterval grpc headers host http " +
		"insecure interval keyFile maxDistance method name ntp path port rcode recursion rise sctp send serverName " +
		"service source status tcp timeout tls transport type udp via warmup"
	names := make([]string, 0, len(keys))
	for key := range keys {
		names = append(names, key)
	}
	slices.Sort(names)
	if got := strings.Join(names, " "); got != want {
		t.Errorf("the fields are %s, want %s", got, want)
	}
}

// Targets have no addresses that only operators may name; of another namespace none at all without
// subnets, while the Trench serves its own.
func TestAddressesOfTargets(t *testing.T) {
	const subnet = "lies in none of the subnets"
	for _, c := range []struct{ network, namespace, address, want string }{
		{subnets, "other", "172.16.0.1", ""},
		{subnets, "other", "172.17.0.1", subnet},
		{subnets, "other", "172.16.9.9", "belongs to a gateway"},
		{"", "trench-a", "172.17.0.1", ""},
		{"", "trench-a", "172.16.9.9", "belongs to a gateway"},
		{"", "trench-a", "169.254.169.254", "is an IPv4 link-local address"},
		{"", "trench-a", "169.253.255.255", ""},
		{"", "trench-a", "169.255.0.0", ""},
		{"", "trench-a", "100.100.100.199", ""},
		{"", "trench-a", "100.100.100.200", "metadata service"},
		{"", "trench-a", "fd00:ec2::254", "metadata service"},
		{"", "trench-a", "127.0.0.7", "is a loopback address"},
		{"", "other", "172.17.0.1", "spec.network.subnets"},
		{", subnets: [0.0.0.0/0]", "other", "169.254.0.9", "is an IPv4 link-local address"},
		{", subnets: [0.0.0.0/0, 169.254.0.0/24]", "other", "169.254.0.9", ""},
		{", subnets: [0.0.0.0/0, 169.254.0.0/24]", "other", "169.254.1.9", "is an IPv4 link-local address"},
	} {
		text := shared(c.network, "") + tenant("trench-a", "own", "2026-01-01T00:00:00Z", "vipgate.io/vips: 20.0.0.1", "") +
			tenant("other", "web", "2026-01-01T00:00:00Z", "vipgate.io/vips: 20.0.0.2", "") +
			attached("trench-a", "own-0", "172.16.0.100") + attached(c.namespace, "web-0", c.address)
		r := translation.Translate(read(t, []byte(text)), options)
		targets := map[bool]int{true: 0, false: 1}[c.want != ""]
		if c.namespace == "trench-a" {
			targets++ // own-0
		}
		for _, v := range r.Services {
			switch {
			case v.Object.Namespace != c.namespace:
				if c.namespace == "other" && v.Targets != 1 {
					t.Errorf("%+v: the Trench lost its target", c)
				}
			case v.Targets != targets, !strings.Contains(fmt.Sprint(v.Problems), c.want):
				t.Errorf("%+v: %d targets, %v", c, v.Targets, v.Problems)
			}
		}
		if warned := strings.Contains(r.Table(), "SubnetsMissing"); warned != (c.network == "") || !r.Trench.Accepted {
			t.Errorf("%+v: warned %t, %s", c, warned, r.Trench.Message)
		}
	}
}

// A VIP belongs to the Service that the status of the Trench names, whatever Services record in
// their own status, and is not free while that Service has no stream.
func TestHoldersOfVIPs(t *testing.T) {
	const (
		older, younger = "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"
		first          = "vipgate.io/vips: 20.0.0.1"
		invalid        = first + `, vipgate.io/check: "{}"`
		record         = `"vipgate.io/vips":"20.0.0.1"`
		bad            = `"vipgate.io/vips":"20.0.0.1","vipgate.io/check":"{}"`
		entry          = `{namespace: trench-a, name: web, uid: trench-a-web, vips: [20.0.0.1/32]}`
		list           = "holders: [" + entry + "]"
		kept           = "trench-a.web 20.0.0.1/32"
	)
	victim := tenant("trench-a", "web", younger, first, recorded(record))
	rival, forger := tenant("other", "web", older, first, ""), tenant("other", "web", older, first, recorded(record))
	for name, c := range map[string]struct{ status, services, want string }{
		"no list, one record":  {"", victim + rival, kept},
		"no list, two records": {"", victim + forger, "other.web 20.0.0.1/32"},
		"no list, record of a refused form": {
			"", tenant("trench-a", "web", younger, invalid, recorded(bad)) + rival, "",
		},
		"forged record": {list, victim + forger, kept},
		"empty list":    {"holders: []", victim + rival, "other.web 20.0.0.1/32"},
		"lost record":   {list, tenant("trench-a", "web", younger, first, "") + forger, kept},
		"other UID":     {strings.Replace(list, "trench-a-web", "x", 1), victim + forger, "other.web 20.0.0.1/32"},
		"listed twice": {
			"holders: [" + entry + ", " + strings.ReplaceAll(entry, "trench-a", "other") + "]", victim + forger, kept,
		},
		"holder without a stream": {list, tenant("trench-a", "web", younger, invalid, "") + forger, ""},
		"the same with a record": {
			list, tenant("trench-a", "web", younger, invalid, recorded(bad)) + forger, "",
		},
		"holder with another VIP": {
			list, tenant("trench-a", "web", younger, "vipgate.io/vips: 20.0.0.2", "") + rival,
			"other.web 20.0.0.1/32 trench-a.web 20.0.0.2/32",
		},
		"deleted holder":        {list, rival, "other.web 20.0.0.1/32"},
		"VIP not of the Trench": {strings.Replace(list, "0.1", "9.1", 1), victim + rival, "other.web 20.0.0.1/32"},
	} {
		t.Run(name, func(t *testing.T) {
			text := shared(subnets, c.status) + c.services
			r := translation.Translate(read(t, []byte(text)), options)
			var got []string
			for stream, vips := range served(r) {
				got = append(got, stream+" "+vips)
			}
			slices.Sort(got)
			if got := strings.Join(got, " "); got != c.want {
				t.Fatalf("%s, want %s\n%s", got, c.want, r.Table())
			}
			for _, v := range r.Holders {
				if c.want == "" && (v.Namespace != "trench-a" || v.VIPs[0] != "20.0.0.1/32") {
					t.Errorf("the VIP of the holder is free: %v", r.Holders)
				}
			}
			if r.Holders == nil || len(r.Holders) != max(1, len(got)) {
				t.Errorf("the holders are %v", r.Holders)
			}
		})
	}
}

// A refused Service frees its other VIPs for the next one, also if both are new.
func TestNewServicesShareVIPs(t *testing.T) {
	text := shared(subnets, "holders: [{namespace: trench-a, name: web, uid: trench-a-web, vips: [20.0.0.1/32]}]") +
		tenant("trench-a", "web", "2026-02-01T00:00:00Z", "vipgate.io/vips: 20.0.0.1", "")
	for i, vips := range []string{"20.0.0.1,20.0.0.2", "20.0.0.2,20.0.0.3", "20.0.0.3", "20.0.0.1"} {
		text += tenant("other", fmt.Sprint("s", i), fmt.Sprintf("2026-01-0%dT00:00:00Z", i+1),
			`vipgate.io/vips: "`+vips+`"`, "")
	}
	r := translation.Translate(read(t, []byte(text)), options)
	if got := served(r); len(got) != 2 || got["other.s1"] != "20.0.0.2/32 20.0.0.3/32" || got["trench-a.web"] == "" ||
		!strings.Contains(r.Services[2].Message, "other/s1 has VIP 20.0.0.3/32") {
		t.Error(r.Table())
	}
}

// A VIP that the Trench lacks for a while returns to its holder, also if that has another stream.
func TestVIPReturnsToItsHolder(t *testing.T) {
	holders := "holders: [{namespace: trench-a, name: web, uid: trench-a-web, vips: [20.0.0.1/32]}]"
	for _, claim := range []string{"20.0.0.1", `"20.0.0.1,20.0.0.2"`, "20.0.0.3"} {
		services := tenant("trench-a", "web", "2026-01-02T00:00:00Z", "vipgate.io/vips: "+claim,
			recorded(`"vipgate.io/vips":"20.0.0.1,20.0.0.2"`)) +
			tenant("other", "web", "2026-01-01T00:00:00Z", "vipgate.io/vips: 20.0.0.1", "")
		without := strings.Replace(shared(subnets, holders), "20.0.0.1/32, ", "", 1)
		o := read(t, []byte(shared(subnets, "")+services))
		text, err := json.Marshal(translation.Translate(read(t, []byte(without+services)), options).Holders)
		harness.Must(t, err)
		var list []any
		harness.Must(t, json.Unmarshal(text, &list))
		o.Trench.Object["status"] = map[string]any{"holders": list}
		got := served(translation.Translate(o, options))
		if rival := got["other.web"] != ""; rival != (claim == "20.0.0.3") {
			t.Errorf("claim %s, holders %v: %v", claim, list, got)
		}
	}
}

// A namespace that the API server refuses keeps its VIPs, and the rest of the Trench takes effect.
func TestUnreadableNamespace(t *testing.T) {
	text := shared(subnets, "holders: [{namespace: other, name: web, uid: other-web, vips: [20.0.0.1/32]}]") +
		tenant("trench-a", "web", "2026-01-01T00:00:00Z", "vipgate.io/vips: 20.0.0.1", "") +
		tenant("trench-a", "next", "2026-01-01T00:00:00Z", "vipgate.io/vips: 20.0.0.2", "")
	text = strings.Replace(text, "9.9}", "9.9, passwordSecret: {name: gw, key: password}}", 1)
	for name, c := range map[string]struct {
		unreadable map[string]string
		served     map[string]string
		problems   []string
	}{
		"readable": {
			nil,
			map[string]string{"trench-a.next": "20.0.0.2/32", "trench-a.web": "20.0.0.1/32"},
			[]string{"Secret gw PasswordMissing Secret trench-a/gw does not exist: create it with the key password"},
		},
		"refused": {
			map[string]string{"other": "forbidden", "trench-a/gw": "forbidden, too"},
			map[string]string{"trench-a.next": "20.0.0.2/32"},
			[]string{
				"Trench trench-a Unreadable forbidden: let a Role there allow get, list and watch",
				"Trench trench-a Unreadable forbidden, too: let a Role there allow get, list and watch",
			},
		},
	} {
		o := read(t, []byte(text))
		o.Unreadable = c.unreadable
		r := translation.Translate(o, options)
		var problems []string
		for _, p := range r.Trench.Problems {
			problems = append(problems, strings.Join([]string{p.Object.Kind, p.Object.Name, p.Reason, p.Message}, " "))
		}
		if got := served(r); !maps.Equal(got, c.served) || len(r.Services) != 2 || !r.Trench.Accepted ||
			len(r.Holders) != 2 || !slices.Equal(problems, c.problems) {
			t.Errorf("%s: %v, holders %v, problems %q", name, got, r.Holders, problems)
		}
	}
}

// A list of holders is bounded, and records count for the VIPs beyond it.
func TestBoundOfHolders(t *testing.T) {
	for _, more := range []int{-1, 0, 1} {
		var listed, all []any
		for i := range v1alpha1.MaxHeld + more {
			text := fmt.Sprintf("20.1.%d.%d/32", i/256, i%256)
			if all = append(all, text); len(listed) < v1alpha1.MaxHeld {
				listed = append(listed, text)
			}
		}
		o := read(t, []byte(shared(subnets, "")+tenant("trench-a", "many", "2026-01-01T00:00:00Z", "", "")+
			tenant("trench-a", "web", "2026-01-03T00:00:00Z", "vipgate.io/vips: 20.0.0.1",
				recorded(`"vipgate.io/vips":"20.0.0.1"`))+
			tenant("other", "web", "2026-01-02T00:00:00Z", "vipgate.io/vips: 20.0.0.1", "")))
		var texts []string
		for _, text := range all {
			texts = append(texts, text.(string))
		}
		o.Services[0].Annotations = map[string]string{"vipgate.io/vips": strings.Join(texts, ",")}
		attractor := o.Trench.Object["spec"].(map[string]any)["attractor"].(map[string]any)
		attractor["vips"] = append(attractor["vips"].([]any), all...)
		o.Trench.Object["status"] = map[string]any{"holders": []any{map[string]any{
			"namespace": "trench-a", "name": "many", "uid": "trench-a-many", "vips": listed,
		}}}
		r := translation.Translate(o, options)
		want := map[bool]string{true: "trench-a.web", false: "other.web"}[more >= 0]
		if served(r)[want] != "20.0.0.1/32" {
			t.Errorf("%d more VIPs than listed: %s", more, r.Table())
		}
		count := 0
		for _, holder := range r.Holders {
			count += len(holder.VIPs)
		}
		if count != min(v1alpha1.MaxHeld, len(all)+1) {
			t.Errorf("%d more VIPs: %d are listed", more, count)
		}
	}
}

// The largest list fits into etcd, with room for the spec.
func TestSizeOfHolders(t *testing.T) {
	list := make([]v1alpha1.Holder, v1alpha1.MaxHeld)
	for i := range list {
		list[i] = v1alpha1.Holder{
			Namespace: strings.Repeat("n", 63), Name: strings.Repeat("s", 63), UID: types.UID(strings.Repeat("u", 36)),
			VIPs: []string{"2001:db8:aaaa:aaaa:aaaa:aaaa:aaaa:aaaa/128"},
		}
	}
	text, err := json.Marshal(list)
	harness.Must(t, err)
	if len(text) > 1300<<10 {
		t.Errorf("%d bytes", len(text))
	}
}

// The earlier targets of a Service that holds no VIP are forged.
func TestGenerationsOfHolders(t *testing.T) {
	const sets = `conditions: [{type: vipgate.io/Generations, status: "True", reason: Recorded, message: ` +
		`'{"earlier":[{"targets":[["web-0","x"],null]}]}'}]`
	for status, want := range map[string]int{
		"": 1, "holders: []": 0,
		"holders: [{namespace: other, name: web, uid: other-web, vips: [20.0.0.1/32]}]": 1,
		"holders: [{namespace: other, name: web, uid: old, vips: [20.0.0.1/32]}]":       0,
	} {
		r := translation.Translate(read(t, []byte(shared(subnets, status)+attached("other", "web-0", "172.16.0.1")+
			tenant("other", "web", "2026-01-01T00:00:00Z", "vipgate.io/vips: 20.0.0.1", sets))), options)
		if r.Config == nil || len(r.Config.Streams) != 1 || len(r.Config.Streams[0].Earlier) != want {
			t.Errorf("%q: want %d earlier sets in\n%s", status, want, r.File)
		}
	}
}

// quoted returns an input with Services of a namespace in the order of their age, of which s2 has
// its VIP already, and with two targets of each.
func quoted(t *testing.T, namespace, fields string, annotations ...string) translation.Objects {
	t.Helper()
	text := strings.Replace(shared(subnets, "holders: [{namespace: "+namespace+", name: s2, uid: "+namespace+
		"-s2, vips: [20.0.0.3/32]}]"), "spec:\n", "spec:\n  "+fields+"\n", 1)
	for i, more := range annotations {
		text += tenant(namespace, fmt.Sprintf("s%d", i), fmt.Sprintf("2026-01-0%dT00:00:00Z", i+1),
			fmt.Sprintf("vipgate.io/vips: 20.0.0.%d%s", i+1, more), "")
	}
	return read(t, []byte(text+attached(namespace, "web-0", "172.16.0.1")+attached(namespace, "web-1", "172.16.0.2")))
}

// The youngest Service without a VIP that passes a quota of another namespace is refused, and the
// others stay; the Trench's own namespace has no quota.
func TestQuotas(t *testing.T) {
	const body = `, vipgate.io/check: '{"any":[{"http":{"port":1,"body":"a"}},` +
		`{"dns":{"port":53,"name":"x","answer":"b"}}]}'`
	for _, c := range []struct {
		namespace, quota string
		served           string
	}{
		{"other", "{streams: 1}", "s2"},
		{"other", "{streams: 2}", "s0 s2"},
		{"other", "{streams: 3}", "s0 s1 s2"},
		{"other", "{streams: 4}", "s0 s1 s2"},
		{"other", "{streams: 130}", "s0 s1 s2"},
		// s0 and s2 have two checks, each of two targets each second.
		{"other", "{targets: 1}", ""}, // the checks of one target pass it
		{"other", "{targets: 2}", "s2"},
		{"other", "{targets: 3}", "s2"},
		{"other", "{targets: 4}", "s2"},
		{"other", "{targets: 5}", "s2"},
		{"other", "{targets: 6}", "s1 s2"},
		{"other", "{targets: 7}", "s1 s2"},
		{"other", "{targets: 8}", "s0 s2"},
		{"other", "{targets: 9}", "s0 s2"},
		{"other", "{targets: 10}", "s0 s1 s2"},
		{"other", "{expressions: 3}", "s1 s2"},
		{"other", "{expressions: 4}", "s0 s1 s2"},
		{"other", "{}", "s0 s1 s2"},
		{"other", "{expressions: 4}\n  defaults: {check: {http: {port: 1, body: x}}}", "s0 s1 s2"},
		{"other", "{expressions: 3}\n  defaults: {check: {http: {port: 1, body: x}}}", "s1 s2"},
		{"trench-a", "{streams: 1, targets: 1, expressions: 1}", "s0 s1 s2"},
	} {
		r := translation.Translate(quoted(t, c.namespace, "quota: "+c.quota, body, "", body), options)
		var got []string
		for _, v := range r.Services {
			if v.Stream != "" {
				got = append(got, v.Object.Name)
			} else if v.Reason != "QuotaExceeded" {
				t.Errorf("%s: %s: %s", c.quota, v.Reason, v.Message)
			}
		}
		if text := strings.Join(got, " "); text != c.served || !r.Trench.Accepted {
			t.Errorf("%s of %s: %q serve, want %q", c.quota, c.namespace, text, c.served)
		}
	}
}

// A stream with a larger table than the Trench's default counts for each 1009 of it.
func TestQuotaOfTables(t *testing.T) {
	size := func(n int) string { return fmt.Sprintf(`, vipgate.io/maglev: '{"size":%d}'`, n) }
	for _, c := range []struct {
		size, quota, whole int
		served             string
	}{
		{1009, 2, 1009, "s0 s2"},
		{1013, 2, 1009, "s2"},
		{1013, 3, 1009, "s0 s2"},
		{2017, 3, 1009, "s0 s2"},
		{2027, 3, 1009, "s2"},
		{131071, 130, 1009, "s2"},
		{131071, 131, 1009, "s0 s2"},
		{2011, 2, 2017, "s0 s2"},
		{2017, 2, 2017, "s0 s2"},
		{2027, 2, 2017, "s2"},
		{2027, 4, 2017, "s0 s2"},
	} {
		o := quoted(t, "other", fmt.Sprintf("quota: {streams: %d}\n  defaults: {maglev: {size: %d}}", c.quota, c.whole),
			size(c.size), size(131071), "")
		var got []string
		for name := range served(translation.Translate(o, options)) {
			got = append(got, strings.TrimPrefix(name, "other."))
		}
		slices.Sort(got)
		if text := strings.Join(got, " "); text != c.served {
			t.Errorf("%+v: %s", c, text)
		}
	}
}

// A target counts for each check a second of each family that it may have.
func TestQuotaOfChecks(t *testing.T) {
	const tcp, dual = `{"tcp":{"port":1}`, ", subnets: [172.16.0.0/16, fd00::/64]"
	for _, c := range []struct {
		subnets, check string
		want           int // of a target
	}{
		{subnets, tcp + "}", 1},
		{subnets, tcp + `,"interval":"400ms"}`, 3},
		{subnets, tcp + `,"interval":"400ms","fastInterval":"100ms","timeout":"100ms"}`, 10},
		{subnets, `{"any":[` + tcp + `,"fastInterval":"200ms","timeout":"9ms"},{"tcp":{"port":2}}],"fastInterval":"1s"}`, 6},
		{dual, tcp + "}", 2},
		{dual, tcp + `,"families":"ipv4"}`, 1},
		{dual, tcp + `,"families":"ipv6"}`, 1},
		{dual, `{"all":[` + tcp + `},{"tcp":{"port":2}}]}`, 4},
	} {
		for more, want := range map[int]bool{-1: false, 0: true, 1: true} {
			quota := fmt.Sprintf("spec:\n  quota: {targets: %d}\n", 2*c.want+more)
			text := strings.Replace(shared(c.subnets, "holders: []"), "spec:\n", quota, 1) +
				tenant("other", "s0", "2026-01-01T00:00:00Z", "vipgate.io/vips: 20.0.0.1, vipgate.io/check: '"+c.check+"'", "") +
				attached("other", "web-0", `172.16.0.1","fd00::1`) + attached("other", "web-1", `172.16.0.2","fd00::2`)
			r := translation.Translate(read(t, []byte(text)), options)
			if v := r.Services[0]; v.Accepted != want || want && v.Targets != 2 || !want && v.Reason != "QuotaExceeded" {
				t.Errorf("%+v: %d more: %s", c, more, r.Table())
			}
		}
	}
}

// New targets of a Service take none of another one's, and of its own none that serve. A rollout
// passes no quota.
func TestQuotaOfTargets(t *testing.T) {
	for _, c := range []struct {
		quota, more, terminating int
		want                     string
		told                     int
	}{
		{6, 0, 0, "2 2 2", 0},
		{6, 0, 2, "2 2 2", 0},
		{6, 0, 3, "2 2 2", 0},
		{6, 1, 0, "2 2 2", 1},
		{7, 1, 0, "3 2 2", 0},
		{7, 2, 0, "3 2 2", 1},
		{8, 2, 0, "4 2 2", 0},
		{9, 9, 0, "5 2 2", 1},
		{5, 0, 0, "2 2 1", 1},
		{5, 1, 0, "2 2 1", 2},
		{3, 0, 0, "1 1 1", 3},
		{2, 0, 0, "1 1 1", 3},
	} {
		o := quoted(t, "other", fmt.Sprintf("quota: {targets: %d}", c.quota), "", "", "")
		for i := range 2 {
			o.Pods[i].Labels["old"], o.Services[1+i].Spec.Selector["old"] = "yes", "yes"
		}
		accept(t, o)
		for i := range c.more + c.terminating {
			pod := o.Pods[0].DeepCopy()
			pod.Name = fmt.Sprint("web-0", i)
			pod.Annotations["k8s.v1.cni.cncf.io/network-status"] = fmt.Sprintf(
				`[{"name":"trench-a/targets","ips":["172.16.1.%d"]}]`, i)
			if i >= c.more {
				pod.DeletionTimestamp = &metav1.Time{}
			}
			pod.Labels = map[string]string{"app": "web", v1alpha1.TrenchLabel: "trench-a"}
			o.Pods = append(o.Pods, pod)
		}
		r := translation.Translate(o, options)
		var got []int
		for _, v := range r.Services {
			if got = append(got, v.Targets); v.Targets > 1 && (v.Names[0] != "web-0" || !slices.Contains(v.Names, "web-1")) {
				t.Errorf("%+v: %v", c, v.Names)
			}
		}
		if told := strings.Count(r.Table(), "targets (one check a second each)"); told != c.told {
			t.Errorf("%+v: %s", c, r.Table())
		}
		if text := strings.Trim(fmt.Sprint(got), "[]"); text != c.want {
			t.Errorf("%+v: targets %s", c, text)
		}
	}
}

// accept makes each Service of an input the holder of its VIP, with two targets that serve, and
// with a record of its form without other annotations.
func accept(t *testing.T, o translation.Objects) {
	t.Helper()
	var holders []any
	for i, service := range o.Services {
		form, address := service.DeepCopy(), fmt.Sprintf("20.0.0.%d", i+1)
		form.Annotations = map[string]string{v1alpha1.VIPsAnnotation: address}
		service.Status.Conditions = []metav1.Condition{
			{Type: "vipgate.io/LastAccepted", Message: translation.Record(form)},
			{Type: "vipgate.io/Generations", Message: `{"current":{"targets":[["web-0","web-1"],null]}}`},
		}
		holders = append(holders, map[string]any{
			"namespace": service.Namespace, "name": service.Name, "uid": string(service.UID), "vips": []any{address + "/32"},
		})
	}
	o.Trench.Object["status"] = map[string]any{"holders": holders}
}

// All other namespaces together have a limit, and new Services lose first.
func TestQuotaOfNamespaces(t *testing.T) {
	template := read(t, []byte(tenant("x", "x", "2026-01-01T00:00:00Z", "x: z", ""))).Services[0]
	const held = "holders: [{namespace: b, name: s209, uid: b-s209, vips: [20.1.0.209/32]}]"
	for quota, want := range map[string]int{
		"{}": v1alpha1.MaxStreams, "{streams: 1}": 3, "{streams: 401}": 401, "{streams: 402}": 402, "{streams: 999}": 630,
	} {
		o := read(t, []byte(strings.NewReplacer("namespaces: [trench-a, other]", "namespaces: [trench-a, a, b, c]\n  quota: "+
			quota).Replace(shared(subnets, held))))
		var vips []any
		for i := range 210 {
			for position, namespace := range []string{"a", "b", "c"} {
				address := fmt.Sprintf("20.1.%d.%d", (position+2)%3, i) // b is first
				vips = append(vips, address+"/32")
				service := template.DeepCopy()
				service.Namespace, service.Name = namespace, fmt.Sprint("s", i)
				service.UID = types.UID(namespace + "-" + service.Name)
				service.Annotations["vipgate.io/vips"] = address
				o.Services = append(o.Services, service)
			}
		}
		o.Trench.Object["spec"].(map[string]any)["attractor"].(map[string]any)["vips"] = vips
		r := translation.Translate(o, options)
		if got := served(r); len(got) != want || got["b.s209"] == "" {
			t.Errorf("%s: %d streams, want %d: %s", quota, len(got), want, r.Trench.Message)
		}
	}
}

// An edit takes no other Service's place.
func TestQuotaOfLargerTable(t *testing.T) {
	o := quoted(t, "other", "quota: {streams: 3}", `, vipgate.io/maglev: '{"size":2017}'`, "", "")
	accept(t, o)
	r := translation.Translate(o, options)
	if v := r.Services[0]; len(served(r)) != 3 || v.Reason != "QuotaExceeded" || r.Config.Streams[0].Maglev.Size != 0 {
		t.Error(r.Table())
	}
}

// A Service that passes a quota by an edit keeps its last accepted form.
func TestQuotaOfEdit(t *testing.T) {
	o := quoted(t, "other", "quota: {expressions: 1}", `, vipgate.io/check: '{"http":{"port":1,"body":"a"}}'`, "",
		`, vipgate.io/check: '{"any":[{"http":{"port":1,"body":"a"}},{"http":{"port":2,"body":"b"}}]}'`)
	accepted := read(t, []byte(tenant("other", "s2", "2026-01-03T00:00:00Z", "",
		recorded(`"vipgate.io/vips":"20.0.0.3"`))))
	o.Services[2].Status = accepted.Services[0].Status
	r := translation.Translate(o, options)
	if v := r.Services[2]; v.Reason != "QuotaExceeded" || v.Stream == "" || len(served(r)) != 3 {
		t.Errorf("%s", r.Table())
	}
}

// A tenant that fills the trench file is refused, youngest Service first, and neither the Trench
// nor another tenant is.
func TestTenantFillsFile(t *testing.T) {
	o := quoted(t, "other", "quota: {targets: 1000000}", "", "", "")
	attractor := o.Trench.Object["spec"].(map[string]any)["attractor"].(map[string]any)
	attractor["vips"] = []any{"20.0.0.1/32", "20.0.0.2/32", "20.0.0.3/32", "20.0.0.4/32"}
	own := read(t, []byte(tenant("trench-a", "own", "2026-02-01T00:00:00Z", "vipgate.io/vips: 20.0.0.4", "")+
		attached("trench-a", "own-0", "172.16.255.1")))
	o.Services, o.Pods = append(o.Services, own.Services...), append(o.Pods, own.Pods...)
	for i := range 36_000 {
		pod := o.Pods[0].DeepCopy()
		pod.Name = fmt.Sprintf("web-%054d", i)
		pod.Annotations["k8s.v1.cni.cncf.io/network-status"] = fmt.Sprintf(
			`[{"name":"trench-a/targets","ips":["172.16.%d.%d"]}]`, 10+i/256, i%256)
		o.Pods = append(o.Pods, pod)
	}
	r := translation.Translate(o, options)
	if got := served(r); !r.Trench.Accepted || len(got) != 3 || got["other.s1"] != "" ||
		len(r.File) > trenchfile.MaxSize {
		t.Errorf("%v: %d bytes\n%s", got, len(r.File), r.Table())
	}
}

// A new Service takes no room in the file from one of another namespace that has VIPs.
func TestNewServiceFillsFile(t *testing.T) {
	text := strings.Replace(shared(subnets, "holders: [{namespace: a, name: s0, uid: a-s0, vips: [20.0.0.1/32]}]"),
		"namespaces: [trench-a, other]", "namespaces: [trench-a, a, b]\n  quota: {targets: 1000000}", 1) +
		tenant("a", "s0", "2026-01-01T00:00:00Z", "vipgate.io/vips: 20.0.0.1", "") + attached("a", "web-0", "172.16.0.1") +
		tenant("b", "new", "2026-01-01T00:00:00Z", "vipgate.io/vips: 20.0.0.2", "")
	o := read(t, []byte(text))
	for namespace, count := range map[string]int{"a": 50_000, "b": 40_000} {
		for i := range count {
			pod := o.Pods[0].DeepCopy()
			pod.Namespace, pod.Name = namespace, fmt.Sprintf("web-%054d", i)
			pod.Annotations["k8s.v1.cni.cncf.io/network-status"] = fmt.Sprintf(
				`[{"name":"trench-a/targets","ips":["172.16.%d.%d"]}]`, 10+i/256, i%256)
			o.Pods = append(o.Pods, pod)
		}
	}
	r := translation.Translate(o, options)
	if got := served(r); !r.Trench.Accepted || len(got) != 1 || got["a.s0"] == "" {
		t.Errorf("%v\n%s", got, r.Table())
	}
}

// Policies of other namespaces have the communities of the Trench only.
func TestCommunitiesOfServices(t *testing.T) {
	for _, c := range []struct{ namespace, allowed, policy, want string }{
		{"other", "[]", `{"ready":{"med":5}}`, ""},
		{"other", "[]", `{"ready":{"communities":["65535:666"]}}`, "community 65535:666 is not one of spec.communities"},
		{"other", `["64512:1"]`, `{"ready":{"communities":["64512:1","64512:2"]}}`, "community 64512:2 is not"},
		{"other", `["64512:1", "64512:1:2"]`, `{"draining":{"communities":["64512:1:2","64512:1"]}}`, ""},
		{"other", `["64512:1"]`, `{"backup":{"communities":["64512:2"]}}`, "community 64512:2 is not"},
		{"other", `["64512:1"]`, `{"unknown":{"communities":["64512:2"]}}`, "community 64512:2 is not"},
		{"trench-a", "[]", `{"ready":{"communities":["65535:666"]}}`, ""},
	} {
		r := translation.Translate(quoted(t, c.namespace, "communities: "+c.allowed, ", vipgate.io/policy: '"+c.policy+"'"),
			options)
		if v := r.Services[0]; v.Accepted != (c.want == "") || !strings.Contains(v.Message, c.want) {
			t.Errorf("%+v: %s", c, v.Message)
		}
	}
}
