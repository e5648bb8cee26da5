package translation_test

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/vipgate/vipgate/pkg/kube/translation"
)

// many returns the objects of a case with more Pods like the first, in Services of perService each.
func many(b testing.TB, pods, perService int) translation.Objects {
	b.Helper()
	o := read(b, base(b))
	first, vips := o.Pods[0], []any{}
	o.Pods = nil
	class := "vipgate.io/trench-a"
	for i := range pods {
		p := first.DeepCopy()
		app := fmt.Sprintf("web-%d", i/perService)
		p.Name, p.Labels["app"] = fmt.Sprintf("web-7d9c5b8f6-%05d", i), app
		p.Annotations["k8s.v1.cni.cncf.io/network-status"] = fmt.Sprintf(`[{"name": "cbr0", "interface": "eth0", `+
			`"ips": ["10.244.0.5"], "mac": "02:00:00:00:00:02", "default": true, "dns": {}}, {"name": "trench-a/targets", `+
			`"interface": "net1", "ips": ["172.16.%d.%d", "fd00:16::%x"], "mac": "02:00:00:00:00:01", "dns": {}}]`,
			i/250, i%250+1, i+1)
		o.Pods = append(o.Pods, p)
		if i%perService > 0 {
			continue
		}
		address := fmt.Sprintf("20.0.%d.%d", i/perService/250, i/perService%250)
		vips = append(vips, address+"/32")
		o.Services = append(o.Services, &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: "trench-a", Name: app, Annotations: map[string]string{"vipgate.io/vips": address},
			},
			Spec: corev1.ServiceSpec{
				Type: corev1.ServiceTypeLoadBalancer, LoadBalancerClass: &class, Selector: map[string]string{"app": app},
				Ports: []corev1.ServicePort{{Port: 8080}},
			},
		})
	}
	o.Trench.Object["spec"].(map[string]any)["attractor"].(map[string]any)["vips"] = vips
	return o
}

func BenchmarkTranslate(b *testing.B) {
	for _, pods := range []int{500, 5000} {
		b.Run(fmt.Sprintf("pods=%d", pods), func(b *testing.B) {
			o := many(b, pods, 100)
			targets := 0
			b.ReportAllocs()
			for b.Loop() {
				r := translation.Translate(o, options)
				targets = 0
				for _, v := range r.Services {
					targets += v.Targets
				}
				b.SetBytes(int64(len(r.File)))
			}
			if targets != pods {
				b.Fatalf("%d targets of %d Pods", targets, pods)
			}
		})
	}
}
