package publication

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/vip"
)

var update = flag.Bool("update", false, "write the golden files")

var (
	vip4 = vip.Require("20.0.0.1/32")
	vip6 = vip.Require("2000::1/128")
)

// golden compares text with a file of testdata.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

const (
	announced   = readinessv1.Advertisement_ADVERTISEMENT_ANNOUNCED
	depreferred = readinessv1.Advertisement_ADVERTISEMENT_DEPREFERRED
	withdrawn   = readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN

	ready     = readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_READY
	notReady  = readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_LB_NOT_READY
	noGateway = readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_NO_GATEWAY
)

// vipStatus returns the status of a VIP, without readiness if readiness is 0.
func vipStatus(v vip.VIP, a readinessv1.Advertisement, r readinessv1.AdvertisementReason,
	readiness readinessv1.VipReason,
) *frontendv1.VipStatus {
	s := &frontendv1.VipStatus{Vip: v.String(), Advertisement: a, Reason: r}
	if readiness != 0 {
		s.Readiness = &readinessv1.VipReadiness{Reason: readiness}
	}
	return s
}

func statusOf(vips ...*frontendv1.VipStatus) *frontendv1.Status {
	return &frontendv1.Status{Vips: vips}
}

// both is the status of a frontend that advertises both VIPs.
func both() *frontendv1.Status {
	return statusOf(vipStatus(vip4, announced, ready, 0), vipStatus(vip6, announced, ready, 0))
}

// noTargets is the status of a frontend that advertises only the IPv4 VIP.
func noTargets() *frontendv1.Status {
	return statusOf(vipStatus(vip4, announced, ready, 0),
		vipStatus(vip6, withdrawn, notReady, readinessv1.VipReason_VIP_REASON_NO_TARGETS))
}

// many is the status of a frontend with n VIPs that advertises the first ones.
func many(n, advertised int) *frontendv1.Status {
	s := &frontendv1.Status{}
	for i := range n {
		v := vip.Require(fmt.Sprintf("20.0.%d.%d/32", i/256, i%256))
		if i < advertised {
			s.Vips = append(s.Vips, vipStatus(v, announced, ready, 0))
		} else {
			s.Vips = append(s.Vips, vipStatus(v, withdrawn, noGateway, 0))
		}
	}
	return s
}

func TestReport(t *testing.T) {
	var b strings.Builder
	for _, c := range []struct {
		name   string
		status *frontendv1.Status
	}{
		{"no VIP", statusOf()},
		{"advertised and withdrawn", noTargets()},
		{"in order", statusOf(vipStatus(vip6, announced, ready, 0), vipStatus(vip4, depreferred,
			readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_DRAINED, 0))},
		{"no stream", statusOf(vipStatus(vip4, withdrawn, notReady, readinessv1.VipReason_VIP_REASON_NO_STREAM))},
		{"the frontend's reason", statusOf(vipStatus(vip4, withdrawn, noGateway,
			readinessv1.VipReason_VIP_REASON_TARGETS_READY))},
		{"reason of a newer frontend", statusOf(vipStatus(vip4, withdrawn, 99, 0))},
		{"LB never seen", statusOf(vipStatus(vip4, withdrawn,
			readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_LB_NEVER_SEEN, 0))},
		{"VIP of a newer frontend", statusOf(&frontendv1.VipStatus{Vip: "?"})},
		{"501 VIPs", many(501, 3)},
	} {
		text, err := json.Marshal(reportOf(c.status))
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&b, "%s\n%s\n\n", c.name, text)
	}
	golden(t, "reports.golden", b.String())
}

// pod returns a pod of the trench with a report. The frontend does not answer if the status is
// nil.
func pod(name string, s *frontendv1.Status) *corev1.Pod {
	r := Report{Problem: "frontend does not answer: connection refused"}
	if s != nil {
		r = reportOf(s)
	}
	text, err := json.Marshal(r)
	if err != nil {
		panic(err)
	}
	return annotated(name, string(text))
}

func annotated(name, report string) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name)}, Status: corev1.PodStatus{Phase: corev1.PodRunning},
	}
	if report != "" {
		p.Annotations = map[string]string{reportKey: report}
	}
	return p
}

// reportKey is the annotation that holds the report of a Pod in tests.
const reportKey = "report"

// reported returns the reports of pods as read from the API server.
func reported(pods []*corev1.Pod) map[types.UID]Reported {
	all := map[types.UID]Reported{}
	for _, p := range pods {
		if text, ok := p.Annotations[reportKey]; ok {
			var r Reported
			r.Invalid = json.Unmarshal([]byte(text), &r.Report) != nil
			all[p.UID] = r
		}
	}
	return all
}

// withReports returns an input with the reports of its pods.
func withReports(in Input) Input {
	in.Reports = reported(in.Siblings)
	return in
}

func with(p *corev1.Pod, change func(*corev1.Pod)) *corev1.Pod {
	change(p)
	return p
}

func TestAdvertised(t *testing.T) {
	now := metav1.Now()
	gone := func(p *corev1.Pod) { p.DeletionTimestamp = &now }
	failed := func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed }
	none := func(reason readinessv1.AdvertisementReason) *frontendv1.Status {
		return statusOf(vipStatus(vip4, withdrawn, reason, 0), vipStatus(vip6, withdrawn, reason, 0))
	}
	var seven []vip.VIP
	for _, v := range reportOf(many(7, 0)).VIPs {
		seven = append(seven, v.VIP)
	}
	pair := []vip.VIP{vip4, vip6}
	var b strings.Builder
	for _, c := range []struct {
		name string
		vips []vip.VIP
		pods []*corev1.Pod
	}{
		{"no pod", pair, nil},
		{"no VIP", nil, []*corev1.Pod{pod("a", both())}},
		{"all", pair, []*corev1.Pod{pod("a", both()), pod("b", both())}},
		{"one VIP by none", pair, []*corev1.Pod{pod("a", noTargets()), pod("b", noTargets())}},
		{"one VIP by some", pair, []*corev1.Pod{pod("b", both()), pod("a", noTargets())}},
		{"different reasons", pair, []*corev1.Pod{
			pod("a", noTargets()), pod("b", none(noGateway)), pod("c", none(noGateway)),
		}},
		{"no report", pair, []*corev1.Pod{pod("a", both()), annotated("b", "")}},
		{"a reason and no report", pair, []*corev1.Pod{pod("a", noTargets()), annotated("b", ""), annotated("c", "")}},
		{"report not valid", pair, []*corev1.Pod{annotated("b", "{")}},
		{"frontend dead", pair, []*corev1.Pod{pod("a", nil)}},
		{"VIP new", pair, []*corev1.Pod{pod("a", statusOf(vipStatus(vip4, announced, ready, 0)))}},
		{"terminating and failed pods do not count", pair, []*corev1.Pod{
			pod("a", both()), with(pod("b", noTargets()), gone), with(pod("c", nil), failed),
		}},
		{"more VIPs than are named", seven, []*corev1.Pod{pod("a", many(7, 0))}},
		{"counts, all", pair, []*corev1.Pod{pod("a", many(501, 501))}},
		{"counts, none", pair, []*corev1.Pod{pod("a", many(501, 0))}},
		{"counts, some", pair, []*corev1.Pod{pod("a", many(501, 3))}},
	} {
		x := readReports(c.pods, reported(c.pods)).advertised(c.vips)
		fmt.Fprintf(&b, "%s\n%s %s: %s\n\n", c.name, x.Status, x.Reason, x.Message)
	}
	golden(t, "advertised.golden", b.String())
}
