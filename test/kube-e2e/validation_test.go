package kubee2e

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
	"github.com/vipgate/vipgate/test/kubernetes"
)

// create creates a Trench with a name and with fields of the spec in JSON, as a dry run.
func (p *publisher) create(attractor, fields string) error {
	p.Helper()
	text := fmt.Sprintf(`{"apiVersion": "vipgate.io/v1alpha1", "kind": "Trench", "metadata": {"name": "tried"},
		"spec": {"attractor": {"name": "a", %s} %s}}`, attractor, fields)
	u := &unstructured.Unstructured{}
	p.must(json.Unmarshal([]byte(text), &u.Object))
	_, err := p.objects.Resource(v1alpha1.Resource).Namespace(namespace).Create(p.Context(), u,
		metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}, FieldValidation: metav1.FieldValidationStrict})
	return err
}

// Errors of the API server name the cause and not the pattern that does not match.
func TestTrenchValidation(t *testing.T) {
	p := newPublisher(t)
	const vips = `"vips": ["20.0.0.1/32", "2000::1/128", "10.0.0.0/8"]`
	const (
		length = "write an IPv4 or IPv6 address and the length of its prefix"
		either = "write either addresses or fromService"
	)
	for name, c := range map[string]struct{ attractor, fields, want string }{
		"valid":                  {vips, "", ""},
		"a VIP without length":   {`"vips": ["20.0.0.1"]`, "", length},
		"a VIP of all addresses": {`"vips": ["0.0.0.0/0"]`, "", length},
		"a VIP with a zero":      {`"vips": ["010.0.0.1/32"]`, "", length},
		"a VIP with other bits": {
			`"vips": ["20.0.0.1/24"]`, "", "write an address without bits after the length of the prefix",
		},
		"a gateway's name": {
			vips + `, "gateways": [{"name": "g", "address": "gw.example.com"}]`, "", "write an IPv4 or IPv6 address, such as",
		},
		"subnets": {vips, `, "network": {"name": "a/b", "subnets": ["172.16.0.0"]}`, length},
		"a network's name": {
			vips, `, "network": {"name": "targets"}`, "write NAMESPACE/NAME of the NetworkAttachmentDefinition",
		},
		"a stream's VIP": {
			vips, `, "streams": [{"name": "s", "vips": ["vip"], "check": {"tcp": {"port": 1}}}]`,
			`should match '^[0-9A-Fa-f:.]+/[0-9]{1,3}$'`,
		},
		"several checks": {
			vips, `, "streams": [{"name": "s", "vips": ["20.0.0.1/32"], "check": {"warmup": "30s",
				"all": [{"http": {"port": 80}, "interval": "2s"}, {"dns": {"port": 53, "name": "a"}, "rise": 1}]}}]`, "",
		},
		"several checks of two kinds": {
			vips, `, "streams": [{"name": "s", "vips": ["20.0.0.1/32"], "check": {"any": [{"tcp": {"port": 1}}],
				"all": [{"tcp": {"port": 1}}]}}]`, "must validate one and only one schema",
		},
		"nested checks": {
			vips, `, "defaults": {"check": {"any": [{"any": [{"tcp": {"port": 1}}]}]}}`,
			`unknown field "spec.defaults.check.any[0].any"`,
		},
		"five checks": {
			vips, `, "defaults": {"check": {"any": [{"tcp": {"port": 1}}, {"tcp": {"port": 2}}, {"tcp": {"port": 3}},
				{"tcp": {"port": 4}}, {"tcp": {"port": 5}}]}}`, "must have at most 4 items",
		},
		"publish nothing": {vips, `, "publish": {"ingressClass": "a"}`, either},
		"publish both":    {vips, `, "publish": {"addresses": ["192.0.2.1"], "fromService": "lb"}`, either},
		"publish from no Service": {
			vips, `, "publish": {"fromService": "a/b/c"}`, "write NAMESPACE/NAME, or NAME, of a Service",
		},
		"publish to classes": {
			vips, `, "publish": {"fromService": "a/b", "ingressClass": "a", "gatewayClass": "b"}`, "",
		},
	} {
		err := p.create(c.attractor, c.fields)
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
		if err != nil && len(err.Error()) > 300 {
			t.Errorf("%s: a message of %d characters: %v", name, len(err.Error()), err)
		}
	}
	many := make([]string, 50_000)
	for i := range many {
		many[i] = fmt.Sprintf(`"10.%d.%d.%d/32"`, i>>16, i>>8&255, i&255)
	}
	if err := p.create(`"vips": [`+strings.Join(many, ",")+`]`, ""); err != nil {
		t.Errorf("50 000 VIPs: %v", err)
	}
}

// docs/reference.md lists the limits of lists.
func TestTrenchLists(t *testing.T) {
	p := newPublisher(t)
	const vips = `"vips": ["20.0.0.1/32"]`
	for _, c := range []struct {
		most                    int
		attractor, fields, item string
	}{
		{1000, vips + `, "gateways": [%s]`, "", `{"name": "g%[1]d", "address": "10.0.%[2]d.%[3]d"}`},
		{256, vips, `, "network": {"name": "a/b", "subnets": [%s]}`, `"172.16.%[1]d.0/24"`},
		{1000, vips, `, "communities": [%s]`, `"64512:%[1]d"`},
		{16, vips, `, "publish": {"addresses": [%s]}`, `"192.0.2.%[1]d"`},
	} {
		for items, want := range map[int]string{c.most: "", c.most + 1: fmt.Sprintf("must have at most %d items", c.most)} {
			list := make([]string, items)
			for i := range list {
				list[i] = fmt.Sprintf(c.item, i, i/256, i%256)
			}
			all := strings.Join(list, ",")
			err := p.create(strings.Replace(c.attractor, "%s", all, 1), strings.Replace(c.fields, "%s", all, 1))
			if (err != nil) != (want != "") || !strings.Contains(fmt.Sprint(err), want) {
				t.Errorf("%d items %s: %v, want %q", items, c.item, err, want)
			}
		}
	}
}

// The translation, the schema of the Trench and the status of Services, Ingresses and Gateways
// accept the same addresses for publication.
func TestAddressesThatCanBePublished(t *testing.T) {
	p := newPublisher(t)
	p.cluster.Apply(t, kubernetes.GatewayAPI(t))
	p.cluster.Apply(t, publishGateways)
	p.cluster.Apply(t, service)
	for _, address := range []string{
		"198.51.100.1", "2001:db8::1", "2001:DB8::1", "2001:0db8::0001", "fe80::1", "lb", "lb-1.example.com", "1.example.com",
		"1a", "bad host", "20.0.0.1/32", "fe80::1%eth0", "010.0.0.1", "10.0.0.256", "10.0.1", "::ffff:192.0.2.1", "10.1",
		"LB.example.com", "lb_1.example", "a..b", "*.example.com", "-a", ".", "1", strings.Repeat("a.", 126) + "a",
	} {
		quoted, err := json.Marshal(address)
		p.must(err)
		err = p.create(`"vips": ["20.0.0.1/32"]`, `, "publish": {"addresses": [`+string(quoted)+`]}`)
		ok := v1alpha1.PublishedAddress(address)
		if ok != (err == nil) {
			t.Errorf("%s can be published: %t; the schema: %v", address, ok, err)
		}
		if !ok {
			if err != nil && !strings.Contains(err.Error(), "write an IP address without length and zone, or a host name") {
				t.Errorf("%s: %v", address, err)
			}
			continue
		}
		field, kind := `"hostname": `+string(quoted), "Hostname"
		if strings.Contains(address, ":") || address == "198.51.100.1" {
			field, kind = `"ip": `+string(quoted), "IPAddress"
		}
		for _, x := range []struct {
			resource     schema.GroupVersionResource
			name, status string
		}{
			{serviceResource, serviceName, `{"loadBalancer": {"ingress": [{` + field + `}]}}`},
			{ingressResource, "mine", `{"loadBalancer": {"ingress": [{` + field + `}]}}`},
			{gatewayResource, "mine", `{"addresses": [{"type": "` + kind + `", "value": ` + string(quoted) + `}]}`},
		} {
			_, err := p.objects.Resource(x.resource).Namespace(namespace).Patch(t.Context(), x.name, types.MergePatchType,
				[]byte(`{"status": `+x.status+`}`), metav1.PatchOptions{}, "status")
			if err != nil {
				t.Errorf("%s of %s: %v", address, x.resource.Resource, err)
			}
		}
	}
}
