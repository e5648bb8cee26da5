package status

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	kubev1 "github.com/vipgate/vipgate/pkg/api/kube/v1"
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/test/harness"
)

// The view of problems has every problem and nothing that is good; equal rows are one.
func TestViewOfProblems(t *testing.T) {
	problems := View{Problems: true}
	for name, texts := range map[string][2]string{
		"frontend": {first(problems.Frontend(goodFrontend(), now)), first(problems.Frontend(badFrontend(), now))},
		"lb":       {problems.LB(goodLB(), now), problems.LB(badLB(), now)},
	} {
		good, bad := texts[0], texts[1]
		if n := strings.Count(good, "\n"); n > 4 {
			t.Errorf("%s without problems has %d lines:\n%s", name, n, good)
		}
		harness.WantText(t, bad, "next: ", "not ready")
		for line := range strings.Lines(bad) {
			if fields := strings.Fields(line); len(fields) > 3 && (fields[1] == "yes" || fields[3] == "ready" &&
				fields[2] != "not") {
				t.Errorf("%s shows what is good: %s", name, line)
			}
		}
	}
	status := goodFrontend()
	for i := range 412 {
		status.Vips = append(status.Vips, &frontendv1.VipStatus{
			Vip: fmt.Sprintf("20.1.%d.%d/32", i/256, i%256), Since: before(0),
			Advertisement: readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN,
			Reason:        readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_NO_SOURCE_ROUTING,
		})
	}
	text, complete := problems.Frontend(status, now)
	if complete || strings.Count(text, "\n") > 10 {
		t.Errorf("not grouped:\n%s", text)
	}
	harness.WantText(t, text, "412 VIPs: 20.1.0.0/32,20.1.0.1/32,20.1.0.2/32 +409", "no source routing")
	refused := &kubev1.Status{Services: []*kubev1.ServiceVerdict{
		{Verdict: &kubev1.Verdict{Object: "Service a/good", Accepted: true}, Targets: 1},
		{Verdict: &kubev1.Verdict{Object: "Service a/bad", Reason: "VIPNotAllowed"}},
	}}
	if text, _ := problems.Kube(refused, now); strings.Contains(text, "a/good") || !strings.Contains(text, "a/bad") {
		t.Errorf("the Services are\n%s", text)
	}
}

func first(text string, _ bool) string { return text }

func TestWideViewHasRevisions(t *testing.T) {
	for name, texts := range map[string][2]string{
		"frontend": {first(Frontend(goodFrontend(), now)), first(View{Wide: true}.Frontend(goodFrontend(), now))},
		"lb":       {LB(goodLB(), now), View{Wide: true}.LB(goodLB(), now)},
	} {
		const position = "instance 7f3a9c revision 42"
		if strings.Contains(texts[0], position) || !strings.Contains(texts[1], position) {
			t.Errorf("%s:\n%s\n%s", name, texts[0], texts[1])
		}
	}
}

func TestSelectVIPs(t *testing.T) {
	frontend, lb := goodFrontend(), goodLB()
	if err := SelectFrontend(frontend, []string{"20.0.0.1/32"}); err != nil || len(frontend.GetVips()) != 1 {
		t.Errorf("%v, %v", err, frontend.GetVips())
	}
	if err := SelectFrontend(goodFrontend(), []string{"20.9.9.9/32"}); err == nil ||
		!strings.Contains(err.Error(), "VIP 20.9.9.9/32 is not configured here; `explain 20.9.9.9/32`") {
		t.Error(err)
	}
	other := proto.CloneOf(lb.GetStreams()[0])
	other.Name, other.Vips = "other", []string{"20.9.9.9/32"}
	lb.Streams = append(lb.Streams, other)
	if err := SelectLB(lb, []string{lb.GetVips()[0].GetVip()}); err != nil || len(lb.GetVips()) != 1 ||
		slices.Contains(lb.GetStreams(), other) {
		t.Errorf("%v, %v, %v", err, lb.GetVips(), lb.GetStreams())
	}
	kube := &kubev1.Status{Services: []*kubev1.ServiceVerdict{{Vips: []string{"20.0.0.1/32"}}, {}}}
	if err := SelectKube(kube, []string{"20.0.0.1/32"}); err != nil || len(kube.GetServices()) != 1 {
		t.Errorf("%v, %v", err, kube.GetServices())
	}
}

func TestScreen(t *testing.T) {
	text, _ := Frontend(badFrontend(), now)
	if got := (Screen{}).Fit(text); got != text {
		t.Error("a pipe gets another text")
	}
	for _, width := range []int{20, 80, 120} {
		fitted := Screen{Width: width}.Fit(text)
		for line := range strings.Lines(fitted) {
			if n := len([]rune(strings.TrimSuffix(line, "\n"))); n > width {
				t.Errorf("%d characters in a line of %d: %s", n, width, line)
			}
		}
		if got, want := strings.Join(strings.Fields(fitted), ""), strings.Join(strings.Fields(text), ""); got != want {
			t.Errorf("text was lost at %d", width)
		}
	}
	const wrapped = "  1  NO  no gateway is up. No session\n" + "           with a gateway is up\n"
	if got := (Screen{Width: 40}).Fit("  1  NO  no gateway is up. No session with a gateway is up\n"); got !=
		strings.Replace(wrapped, "           with", "         with", 1) {
		t.Errorf("got\n%s", got)
	}
	coloured := Screen{Colour: true}.Fit("STOPPING: x\nok  a  b\nNO  gate  withdrawn\nbook  NO way\n")
	const want = red + "STOPPING: x" + plain + "\n" + green + "ok" + plain + "  a  b\n" + red + "NO" + plain +
		"  gate  " +
		red + "withdrawn" + plain + "\nbook  NO way\n"
	if coloured != want {
		t.Errorf("got %q", coloured)
	}
	if got := (Screen{Height: 4}).Fit("1\n2\n3\n4\n5\n"); got != "1\n2\nand 3 more lines: `-o problems`, or name VIPs\n" {
		t.Errorf("got %q", got)
	}
}
