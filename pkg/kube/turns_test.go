package kube

import (
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/kube/translation"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
)

func TestWithhold(t *testing.T) {
	gateway := func(name, address string, hold time.Duration) trench.Gateway {
		return trench.Gateway{Name: name, Address: netip.MustParseAddr(address), HoldTime: hold}
	}
	four, six := gateway("four", "192.0.2.1", 3), gateway("six", "2001:db8::1", 3)
	slow4, slow6 := gateway("four", "192.0.2.1", 6), gateway("six", "2001:db8::1", 6)
	renamed, added := gateway("new", "192.0.2.1", 3), gateway("added", "192.0.2.2", 3)
	for name, test := range map[string]struct{ old, next, want []trench.Gateway }{
		"no change":   {[]trench.Gateway{four, six}, []trench.Gateway{four, six}, []trench.Gateway{four, six}},
		"both change": {[]trench.Gateway{four, six}, []trench.Gateway{slow4, slow6}, []trench.Gateway{four, six}},
		"renamed":     {[]trench.Gateway{four, six}, []trench.Gateway{six, renamed}, []trench.Gateway{six, four}},
		"one of two":  {[]trench.Gateway{four, added}, []trench.Gateway{slow4, added}, []trench.Gateway{slow4, added}},
		"added":       {[]trench.Gateway{four}, []trench.Gateway{slow4, added}, []trench.Gateway{four, added}},
		"removed":     {[]trench.Gateway{four, six}, []trench.Gateway{four}, []trench.Gateway{four}},
		"first file":  {nil, []trench.Gateway{slow4}, []trench.Gateway{slow4}},
	} {
		got := withhold(test.old, test.next, lastSessions(test.old, test.next))
		if !slices.Equal(got, test.want) {
			t.Errorf("%s: %v, want %v", name, got, test.want)
		}
	}
}

// The gateways in force keep their password files, and a mix that is not valid is not written.
func TestFileWithWithheldGateways(t *testing.T) {
	dir := t.TempDir()
	f := &files{trench: filepath.Join(dir, "trench.yaml"), keyDir: filepath.Join(dir, "keys")}
	config := func(vips, file string, hold time.Duration) translation.Result {
		gateway := trench.Gateway{
			Name: "gw", Address: netip.MustParseAddr("192.0.2.1"), HoldTime: hold, PasswordFile: filepath.Join(f.keyDir, file),
		}
		served, err := vip.Parse(vips)
		harness.Must(t, err)
		c := &trench.Config{Trench: "a", Attractor: trench.Attractor{
			Name: "a", VIPs: []vip.VIP{served}, Gateways: []trench.Gateway{gateway},
		}}
		return translation.Result{
			Config: c, File: translation.File("a", c), Keys: map[string][]byte{file: []byte("secret " + file)},
		}
	}
	old, next := config("20.0.0.1/32", "old", 3*time.Second), config("20.0.0.2/32", "new", 6*time.Second)
	if _, err := f.write(old); err != nil {
		t.Fatal(err)
	}
	gateways := f.gateways()
	if len(gateways) != 1 || gateways[0].HoldTime != 3*time.Second || gateways[0].RemoteASN != 0 {
		t.Fatalf("gateways on disk: %+v", gateways)
	}
	mixed, valid := f.with(next, gateways)
	if !valid {
		t.Fatal("not valid")
	}
	if _, err := f.write(mixed); err != nil {
		t.Fatal(err)
	}
	if key, err := os.ReadFile(filepath.Join(f.keyDir, "old")); err != nil || string(key) != "secret old" {
		t.Errorf("password in force: %q, %v", key, err)
	}
	if got := f.gateways(); !slices.Equal(got, gateways) {
		t.Errorf("gateways on disk: %+v", got)
	}
	if _, valid := f.with(config("192.0.2.0/24", "new", time.Second), gateways); valid {
		t.Error("a gateway in a VIP is valid")
	}
}
