package lab

import (
	"fmt"
	"testing"

	"github.com/vipgate/vipgate/test/harness"
)

func TestParseTrace(t *testing.T) {
	trace, err := parseTrace(`2026-01-02 05:23:24.400014 <TRACE> trench0: State changed to up
2026-01-02 05:23:24.400042 <TRACE> trench0.ipv4 < added 0.0.0.0/0 0L 2G blackhole
2026-01-02 05:23:24.407527 <INFO> heard 20.0.0.1/32 (path 8103) (clist ) trench0
2026-01-02 05:23:24.407527 <TRACE> trench0.ipv4 > added [best] 20.0.0.1/32 0L 7G unicast
2026-01-02 05:23:25.407527 <INFO> heard 20.0.0.1/32 (path 8103 8103) (clist (65535,0) (1,2)) trench0
2026-01-02 05:23:26.604662 <TRACE> trench1.ipv6 > removed [sole] 2000::2/128 0L 6G unicast
2026-01-02 05:23:27.647592 <TRACE> trench0.ipv4 > removed 20.0.0.2/32 0L 7G unicast
2026-01-02 05:23:28.647592 <TRACE> trench0.ipv4 > removed [so`)
	harness.Must(t, err)
	got := fmt.Sprint(trace)
	want := "[05:23:24.407527 20.0.0.1/32 announced path=[8103] communities=[]" +
		" 05:23:25.407527 20.0.0.1/32 announced path=[8103 8103] communities=[(65535,0) (1,2)]" +
		" 05:23:26.604662 2000::2/128 withdrawn 05:23:27.647592 20.0.0.2/32 withdrawn]"
	if got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if trace[0].Session != "trench0" || trace[2].Session != "trench1" {
		t.Errorf("sessions %s and %s, want trench0 and trench1", trace[0].Session, trace[2].Session)
	}
	if trace[0].GracefulShutdown() || !trace[1].GracefulShutdown() {
		t.Error("GRACEFUL_SHUTDOWN is not distinguished from its absence")
	}
	if _, err := parseTrace("yesterday noon <INFO> heard 20.0.0.1/32 (path ) (clist ) trench0\n"); err == nil {
		t.Error("a line without a time is no error")
	}
}
