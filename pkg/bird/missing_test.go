package bird

import (
	"net/netip"
	"regexp"
	"slices"
	"testing"
	"time"
)

// The protocol names equal the names in the rendered file: a wrong name would count as missing
// forever.
func TestProtocolsOfConfiguration(t *testing.T) {
	t.Parallel()
	vrrp := staticInput()
	vrrp.VRRP = []netip.Addr{netip.MustParseAddr("169.254.100.7"), netip.MustParseAddr("fd00::7")}
	for name, in := range map[string]renderInput{
		"nothing": {Interface: "eth0", Options: Options{RouterID: vrrp.RouterID}}, "BGP": fullInput(),
		"static": staticInput(), "VRRP": vrrp,
	} {
		content, err := render(in)
		if err != nil {
			t.Fatal(err)
		}
		var want []string
		heads := regexp.MustCompile(`(?m)^protocol \w+ '?([\w.-]+)'? \{`)
		for _, m := range heads.FindAllStringSubmatch(string(content), -1) {
			want = append(want, m[1])
		}
		got := in.protocols()
		slices.Sort(got)
		if slices.Sort(want); !slices.Equal(got, want) {
			t.Errorf("%s: protocols %v, want %v", name, got, want)
		}
	}
}

func TestMissingProtocols(t *testing.T) {
	t.Parallel()
	begin := time.Now()
	m, now := missing{}, begin
	run := func(d time.Duration, lacking bool) (at []int) {
		for end := now.Add(d); now.Before(end); now = now.Add(100 * time.Millisecond) {
			if m.observe(now, lacking, false) {
				at = append(at, int(now.Sub(begin)/time.Second))
			}
		}
		return at
	}
	for range 10 {
		if at := append(run(lackTime, true), run(time.Second, false)...); at != nil {
			t.Fatalf("configured again at %v", at)
		}
	}
	begin = now
	if got, want := run(2*time.Minute, true), []int{5, 6, 8, 12, 20, 36, 66, 96}; !slices.Equal(got, want) {
		t.Errorf("configured again at %v, want %v", got, want)
	}
	run(time.Second, false)
	begin = now
	if got, want := run(10*time.Second, true), []int{5}; !slices.Equal(got, want) {
		t.Errorf("a second time: at %v, want %v", got, want)
	}
	run(2*time.Minute, false)
	begin = now
	if got, want := run(7*time.Second, true), []int{5, 6}; !slices.Equal(got, want) {
		t.Errorf("later: at %v, want %v", got, want)
	}
	m, now = missing{}, now.Add(time.Second)
	if !m.observe(now, true, true) || m.observe(now, true, true) {
		t.Error("without the loopback session: not configured again once")
	}
}
