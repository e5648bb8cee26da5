package kernel

import (
	"slices"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/test/lab"
)

func TestOptionsAreValidated(t *testing.T) {
	for _, tt := range []struct {
		name    string
		o       Options
		problem string
	}{
		{"defaults", Options{}, ""},
		{"main table", Options{TableID: 254}, "routing table 254"},
		{"blackholes in the default table", Options{TableID: 252}, "routing table 252"},
		{"last table", Options{TableID: 1<<32 - 1}, "routing table"},
		{"priority of main", Options{Priority: 32766}, "rule priority 32766"},
		{"negative priority", Options{Priority: -1}, "rule priority -1"},
		{"mark without mask", Options{Mark: 1}, "outside its mask"},
		{"mask without mark", Options{Mask: 0xff}, "mark 0"},
		{"mark outside mask", Options{Mark: 0x100, Mask: 0xff}, "outside its mask"},
		{"mark in mask", Options{Mark: 0x10, Mask: 0xf0}, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := tt.o.Validate()
			if (err == nil) != (tt.problem == "") || (err != nil && !strings.Contains(err.Error(), tt.problem)) {
				t.Errorf("got %v, want %q", err, tt.problem)
			}
			if err != nil {
				if runErr := New(tt.o).Run(t.Context()); runErr == nil {
					t.Error("Run took invalid options")
				}
			}
		})
	}
}

func TestStrictReversePathIsReported(t *testing.T) {
	ns := lab.NewNetNS(t)
	must(t, lab.Veth(ns, "ext", lab.NewNetNS(t), "peer"))
	problems := func() (list []string) {
		must(t, ns.Do(func() error {
			list = reversePathProblems()
			return nil
		}))
		return list
	}
	for _, tt := range []struct {
		all, ext string
		want     int
	}{{"0", "0", 0}, {"0", "1", 1}, {"1", "0", 1}, {"1", "2", 0}, {"2", "1", 0}, {"0", "2", 0}} {
		must(t, ns.Sysctl("net.ipv4.conf.all.rp_filter", tt.all))
		must(t, ns.Sysctl("net.ipv4.conf.ext.rp_filter", tt.ext))
		got := slices.DeleteFunc(problems(), func(s string) bool { return !strings.Contains(s, "interface ext ") })
		if len(got) != tt.want {
			t.Errorf("all %s, ext %s: %q", tt.all, tt.ext, got)
		}
	}
}
