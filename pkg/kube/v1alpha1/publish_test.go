package v1alpha1

import "testing"

func TestPublishedAddress(t *testing.T) {
	for address, want := range map[string]bool{
		"198.51.100.1": true, "2001:db8::1": true, "lb.example.com": true, "lb": true, "lb-1.example": true,
		"": false, "bad host": false, "20.0.0.1/32": false, "fe80::1%eth0": false, "::ffff:192.0.2.1": false,
		"010.0.0.1": false, "10.0.0.256": false,
		"10.0.1": false, "LB.example.com": false, "lb_1.example": false, "a..b": false, "*.example.com": false,
	} {
		if PublishedAddress(address) != want {
			t.Errorf("%q: %t", address, !want)
		}
	}
}
