package translation

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

func TestMatch(t *testing.T) {
	ports := []corev1.ServicePort{
		{Port: 443},
		{Port: 53, Protocol: corev1.ProtocolUDP},
		{Port: 80, Protocol: corev1.ProtocolTCP},
		{Port: 80},
		{Port: 9, Protocol: corev1.ProtocolSCTP},
	}
	const want = "[{protocols: [sctp], ports: [9]}, {protocols: [tcp], ports: [80, 443]}, {protocols: [udp], ports: [53]}]"
	if got := string(appendValue(nil, match(ports))); got != want {
		t.Errorf("match: %s, want %s", got, want)
	}
}

func TestShortened(t *testing.T) {
	long := strings.Repeat("a", 300)
	for in, want := range map[string]string{
		"web-1": "web-1", "a.b_c": "a.b_c", "": "-e3b0c44298fc1c14", "a b": "a-b-c8687a08aa5d6ed2",
		long: strings.Repeat("a", 43) + "-9835fa6bf4e20a9b",
	} {
		if got := shortened(in, 60); got != want {
			t.Errorf("shortened(%q) is %q, want %q", in, got, want)
		}
	}
	if a, b := shortened(long+"1", 60), shortened(long+"2", 60); a == b || len(a) != 60 {
		t.Errorf("%q and %q", a, b)
	}
}

func TestMessageIsBounded(t *testing.T) {
	if m := message("%s", strings.Repeat("ö", 1000)); len(m) > maxMessage || !strings.HasSuffix(m, "ö…") {
		t.Errorf("%d bytes: %s", len(m), m)
	}
}
