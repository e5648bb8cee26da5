package dashboard

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	lbv1 "github.com/vipgate/vipgate/pkg/api/lb/v1"
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/pods"
	"github.com/vipgate/vipgate/test/chromium"
	"github.com/vipgate/vipgate/test/harness"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const hostile = `<script>window.hacked = 1</script><img src=x onerror="window.hacked = 1">`

// fakeSource has two equal pods.
type fakeSource struct {
	frontend *frontendv1.Status
	lb       *lbv1.Status
	events   *adminv1.ListEventsResponse
	failed   atomic.Bool // pod-b does not answer
}

func (*fakeSource) Members(context.Context) (list []pods.Member, err error) {
	for _, name := range []string{"pod-a", "pod-b"} {
		list = append(list, pods.Member{Name: name, Programs: map[string]string{pods.Frontend: "", pods.LB: ""}})
	}
	return list, nil
}

func (s *fakeSource) Run(ctx context.Context, pod, program string, command []string, stdout io.Writer) error {
	if strings.Contains(strings.Join(command, " "), "--follow") {
		<-ctx.Done()
		return ctx.Err()
	}
	if s.failed.Load() && pod == "pod-b" {
		return errors.New("no answer " + hostile)
	}
	var answer proto.Message = s.frontend
	if program == pods.LB {
		answer = s.lb
	}
	if command[1] == "events" {
		answer = s.events
	}
	text, err := protojson.Marshal(answer)
	if err == nil {
		_, err = stdout.Write(text)
	}
	return err
}

// newSource returns pods that advertise VIPs, except for the last one.
func newSource(vips int) *fakeSource {
	source := &fakeSource{
		frontend: &frontendv1.Status{Trench: "trench-a", Gateways: []*frontendv1.GatewayStatus{
			{Name: hostile, Address: "192.0.2.1", Up: true, State: "Established"},
		}},
		lb: &lbv1.Status{Streams: []*lbv1.StreamStatus{{Name: "stream-a", Targets: []*lbv1.TargetStatus{
			{Name: "target-" + hostile, Address: "172.16.0.1", State: "not ready", LastError: "status 500: " + hostile},
		}}}},
		events: &adminv1.ListEventsResponse{Events: []*adminv1.Event{
			{Time: timestamppb.Now(), Sequence: 1, Object: "20.0.0.1/32", From: "announced", To: "withdrawn", Detail: hostile},
		}},
	}
	for i := range vips {
		vip := &frontendv1.VipStatus{
			Vip:           fmt.Sprintf("20.0.%d.%d/32", i/250, i%250),
			Advertisement: readinessv1.Advertisement_ADVERTISEMENT_ANNOUNCED, Gateways: []string{hostile},
			Reason: readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_READY,
		}
		if i == vips-1 {
			vip.Advertisement = readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN
			vip.Reason = readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_NO_GATEWAY
			vip.Gateways = nil
		}
		source.frontend.Vips = append(source.frontend.Vips, vip)
	}
	return source
}

// serve returns the address of a page.
func serve(t *testing.T, source pods.Source) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	harness.Must(t, err)
	page := New(source)
	harness.Run(t, func(ctx context.Context) error { return page.Serve(ctx, listener) })
	return page.URL(listener)
}

// Of 10 000 VIPs the page has those with problems, and finds the others. Markup in names and errors
// is text. A pod that does not answer is not good, and what it answered before is old.
func TestPage(t *testing.T) {
	source := newSource(10_000)
	page := chromium.Open(t, serve(t, source))
	page.WaitFor(`document.querySelector("#verdict").innerText.includes("9999 of 10000 VIPs announced by every pod")`)
	page.WaitFor(`document.querySelector("#vips tbody tr.bad th").innerText === "20.0.39.249/32"`)
	page.WaitFor(`document.querySelectorAll("#vips tbody tr").length === 100`)
	page.WaitFor(`document.querySelector("#groups").innerText.includes("1 VIP withdrawn")`)
	for _, id := range []string{"gateways", "targets", "events", "steps"} {
		page.WaitFor(fmt.Sprintf(`document.querySelector("#%s").innerText.includes(%q)`, id, hostile))
	}
	page.Evaluate(`filter = document.querySelector("#filter"); filter.value = "20.0.17.2/"`)
	page.Evaluate(`filter.dispatchEvent(new Event("input"))`)
	page.WaitFor(`document.querySelector("#vips tbody th").innerText === "20.0.17.2/32"`)
	page.WaitFor(`document.querySelector("#vips tbody tr.good")`)

	source.failed.Store(true)
	page.WaitFor(`document.querySelector("#pods tbody tr.bad:last-child").innerText.includes("no answer <script>")`)
	page.WaitFor(`document.querySelector("#vips tbody tr.good").innerText.includes("pod-a")`)
	page.WaitFor(`document.querySelector("#vips tbody tr.unknown").innerText.includes("pod-b")`)
	if got := page.Evaluate(`[window.hacked, document.images.length, document.scripts.length].join()`); got != ",0,1" {
		t.Errorf("hacked, images, scripts: %s", got)
	}
	if got := page.Evaluate(`document.body.innerHTML = "<b>x</b>"`); !strings.HasPrefix(got, "exception") {
		t.Errorf("text became HTML: %s", got)
	}
}

func TestOnlyTheOwnerOfTheAddressReads(t *testing.T) {
	url := serve(t, newSource(1))
	base, token := url[:len("http://127.0.0.1:")+strings.Index(url[len("http://127.0.0.1:"):], "/")+1], len(url)-1
	for _, c := range []struct {
		method, url, host string
		status            int
	}{
		{http.MethodGet, url, "", http.StatusOK},
		{http.MethodGet, url + "app.js", "", http.StatusOK},
		{http.MethodGet, base, "", http.StatusNotFound},
		{http.MethodGet, base + "app.js", "", http.StatusNotFound},
		{http.MethodGet, url[:token-1] + "x/", "", http.StatusNotFound},
		{http.MethodGet, url[:token], "", http.StatusNotFound},
		{http.MethodGet, url, "rebound.example", http.StatusNotFound},
		{http.MethodGet, url + "stream", "localhost", http.StatusNotFound},
		{http.MethodPost, url + "stream", "", http.StatusMethodNotAllowed},
		{http.MethodGet, url + "stream?q=" + strings.Repeat("x", maxQuery+1), "", http.StatusTooManyRequests},
	} {
		request, err := http.NewRequestWithContext(t.Context(), c.method, c.url, nil)
		harness.Must(t, err)
		request.Host = c.host
		response, err := http.DefaultTransport.RoundTrip(request)
		harness.Must(t, err)
		harness.Must(t, response.Body.Close())
		if response.StatusCode != c.status {
			t.Errorf("%s %s of %q: status %d, want %d", c.method, c.url, c.host, response.StatusCode, c.status)
		}
		if response.Header.Get("Content-Security-Policy") != policy || response.Header.Get("Cache-Control") != "no-store" {
			t.Errorf("%s: headers %v", c.url, response.Header)
		}
	}
	http.DefaultTransport.(*http.Transport).CloseIdleConnections()
}

func TestOnlyLoopback(t *testing.T) {
	listener, err := net.Listen("tcp", "0.0.0.0:0")
	harness.Must(t, err)
	harness.WantError(t, New(newSource(1)).Serve(t.Context(), listener), "not a loopback address")
}

// Nothing is good without a recent answer of its program.
func TestOldAnswersAreNotGood(t *testing.T) {
	now := time.Now()
	source := newSource(1)
	source.frontend.Vips[0].Advertisement = readinessv1.Advertisement_ADVERTISEMENT_ANNOUNCED
	source.frontend.Vips[0].Gateways = []string{"gateway-a"}
	source.lb.Streams[0].Targets[0].State = "ready"
	for _, c := range []struct {
		name   string
		change func(*state)
		want   [4]int // levels of pod, VIP, gateway and target
	}{
		{"recent", func(*state) {}, [4]int{good, good, good, good}},
		{"hung frontend", func(s *state) {
			s.pods[0].frontend.at = now.Add(-staleAfter - 1)
		}, [4]int{bad, unknown, unknown, good}},
		{"hung lb", func(s *state) { s.pods[0].lb.at = now.Add(-staleAfter - 1) }, [4]int{bad, good, good, unknown}},
		{"failed lb", func(s *state) {
			s.pods[0].lb.failed, s.pods[0].problems = true, []string{"lb does not answer: x"}
		}, [4]int{bad, good, good, unknown}},
		{"no list of pods", func(s *state) { s.err = errors.New("no API server") }, [4]int{bad, unknown, unknown, unknown}},
	} {
		s := state{pods: []pod{{
			name: "a", lb: answer[*lbv1.Status]{status: source.lb, at: now},
			frontend: answer[*frontendv1.Status]{status: source.frontend, at: now},
		}}}
		c.change(&s)
		page := s.snapshot(now, "")
		got := [4]int{
			page.Pods[0].Level, page.VIPs.Objects[0].Level, page.Gateways.Objects[0].Level, page.Targets.Objects[0].Level,
		}
		if got != c.want {
			t.Errorf("%s: levels %v, want %v; %v", c.name, got, c.want, page.Pods[0].Problems)
		}
	}
}
