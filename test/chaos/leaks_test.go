package main

import "testing"

func TestRenumbering(t *testing.T) {
	renumber := renumbering(`default via 172.16.1.10 dev int0 table 5007 proto 179
default via 172.16.1.12 dev int0 table 5000 proto 179
default via 192.0.2.1 dev ext0 table 5001 proto 179
blackhole default table 5007 proto 179
`)
	for text, want := range map[string]string{
		"from all fwmark 0x138f/0xffffff lookup 5007": "from all fwmark 0x1388/0xffffff lookup 5000",
		"0x0000138f : goto target/5007":               "0x00001388 : goto target/5000",
		"ct mark set 0xff001388":                      "ct mark set 0xff00138a",
		"table 5001":                                  "table 5001",
		"comment \"stream-a/target-0 172.16.1.10\"":   "comment \"stream-a/target-0 172.16.1.10\"",
	} {
		if got := renumber(text); got != want {
			t.Errorf("%q becomes %q, want %q", text, got, want)
		}
	}
}
