package sysctl

import "testing"

func TestCommandEscapesDots(t *testing.T) {
	for key, want := range map[Key]string{
		"net/ipv4/ip_forward":               "sysctl -w net.ipv4.ip_forward=1",
		IPv4Interface("eth0", "rp_filter"):  "sysctl -w net.ipv4.conf.eth0.rp_filter=1",
		IPv4Interface("ext.5", "rp_filter"): "sysctl -w net/ipv4/conf/ext.5/rp_filter=1",
	} {
		if got := key.SetCommand("1"); got != want {
			t.Errorf("%q: got %q, want %q", string(key), got, want)
		}
	}
}

func TestRead(t *testing.T) {
	keys := Glob("net/ipv4/conf/*/rp_filter")
	if len(keys) < 2 || keys[0].Read() == "" {
		t.Errorf("got %q, the first is %q", keys, keys[0].Read())
	}
	if got := Key("net/no_such_parameter").Read(); got != "" {
		t.Errorf("got %q for a parameter that does not exist", got)
	}
}
