package change

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/trench/file"
)

const inForce = `
trench: red
attractor:
  name: a
  vips: [20.0.0.1/32, 20.0.0.2/32, 2000::1/128]
  gateways:
    - {name: one, address: 172.16.0.254}
    - {name: two, address: 172.16.0.253, bfd: {}}
streams:
  - name: web
    vips: [20.0.0.1/32, 2000::1/128]
    check: {tcp: {port: 80}}
    targets:
      - {name: x, ips: [10.0.0.1]}
      - {name: y, ips: [10.0.0.2]}
  - {name: idle, vips: [20.0.0.2/32]}
`

func parse(t *testing.T, text string) *trench.Config {
	t.Helper()
	config, err := file.Parse("trench.yaml", []byte(text), trench.DefaultDefaults())
	if err != nil {
		t.Fatal(err)
	}
	return config
}

func TestBetween(t *testing.T) {
	tests := []struct {
		name  string
		edits []string // pairs of old and new text
		want  string
	}{
		{"nothing", nil, "no change\n"},
		{"a comment", []string{"trench: red", "trench: red # edge"}, "no change\n"},
		{"defaults written out", []string{"bfd: {}", "holdTime: 3s, bfd: {multiplier: 3}"}, "no change\n"},
		{"another order", []string{"20.0.0.1/32, 20.0.0.2/32", "20.0.0.2/32, 20.0.0.1/32"}, "no change\n"},
		{
			"VIPs",
			[]string{"vips: [20.0.0.1/32, 20.0.0.2/32", "vips: [20.0.0.1/32, 20.0.0.3/32", "[20.0.0.2/32]", "[20.0.0.3/32]"},
			"+ VIP 20.0.0.3/32\n- VIP 20.0.0.2/32\n~ stream idle: table changes (vips)\n",
		},
		{
			"a gateway renamed",
			[]string{"name: two", "name: three"},
			"~ gateway two: session restarts (name)\nsessions restart one after another, each in about 3s: 3s in all\n",
		},
		{
			"another gateway",
			[]string{"name: two, address: 172.16.0.253", "name: three, address: 172.16.0.3"},
			"+ gateway three\n- gateway two\n",
		},
		{
			"sessions",
			[]string{"172.16.0.254", "172.16.0.252, holdTime: 9s", "bfd: {}", "bfd: {multiplier: 5}"},
			"~ gateway one: session restarts (address, holdTime)\n~ gateway two: changes (bfd)\n" +
				"sessions restart one after another, each in about 3s: 3s in all\n",
		},
		{
			"the interface",
			[]string{"name: a\n", "name: a\n  interface: eth1\n"},
			"~ gateway one: session restarts (attractor.interface)\n" +
				"~ gateway two: session restarts (attractor.interface)\n~ attractor.interface\n" +
				"sessions restart one after another, each in about 3s: 6s in all\n",
		},
		{"a stream renamed", []string{"name: web", "name: www"}, "+ stream www\n- stream web\n"},
		{
			"targets",
			[]string{"10.0.0.1]}", "10.0.0.3]}\n      - {name: z, ips: [10.0.0.4]}"},
			"~ stream web: table changes (targets: 2 added, 1 removed)\n",
		},
		{
			"a terminating target",
			[]string{"[10.0.0.2]", "[10.0.0.2], terminating: true"},
			"~ stream web: table changes (targets: 0 added, 0 removed)\n",
		},
		{
			"the table",
			[]string{"{tcp: {port: 80}}", "{tcp: {port: 80}}\n    maglev: {size: 2003}"},
			"~ stream web: table changes (maglev)\n",
		},
		{
			"a check",
			[]string{"{tcp: {port: 80}}", "{tcp: {port: 81}}\n    minReady: 2"},
			"~ stream web: changes (minReady, check: the old one decides until targets pass the new one)\n",
		},
		{
			"the path of a check",
			[]string{"{tcp: {port: 80}}", "{tcp: {port: 80}, source: [10.0.0.9]}"},
			"~ stream web: changes (check: the old one decides until targets pass the new one)\n",
		},
		{
			"one of two checks",
			[]string{"{tcp: {port: 80}}", "{all: [{tcp: {port: 80}}, {tcp: {port: 81}}]}"},
			"~ stream web: changes (check: the old one decides until targets pass the new one)\n",
		},
		{
			"the timing of a check",
			[]string{"{tcp: {port: 80}}", "{tcp: {port: 80}, fall: 9}"},
			"~ stream web: changes (check)\n",
		},
		{"names", []string{"name: a\n", "name: b\n", "red", "blue"}, "~ trench\n~ attractor.name\n"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			next := strings.NewReplacer(tt.edits...).Replace(inForce)
			if len(tt.edits) > 0 && next == inForce {
				t.Fatal("the edit changes nothing")
			}
			change := Between(parse(t, inForce), parse(t, next))
			if got := change.Text(2 * time.Second); got != tt.want {
				t.Errorf("got\n%swant\n%s", got, tt.want)
			}
			// An added object is a removed one in the other direction.
			back := Between(parse(t, next), parse(t, inForce))
			if len(back.VIPs.Added) != len(change.VIPs.Removed) || len(back.Streams.Removed) != len(change.Streams.Added) ||
				len(back.ChangedGateways) != len(change.ChangedGateways) || back.Empty() != change.Empty() {
				t.Errorf("back: %+v", back)
			}
		})
	}
}

func TestJSON(t *testing.T) {
	next := strings.NewReplacer("10.0.0.1]", "10.0.0.9]", "bfd: {}", "holdTime: 9s",
		"  - {name: idle, vips: [20.0.0.2/32]}\n", "").Replace(inForce)
	text, err := json.Marshal(Between(parse(t, inForce), parse(t, next)))
	if err != nil {
		t.Fatal(err)
	}
	want := `{"vips":{},"gateways":{},"streams":{"removed":["idle"]},` +
		`"changedGateways":[{"name":"two","fields":["holdTime","bfd"],"restarts":true}],` +
		`"changedStreams":[{"name":"web","fields":["targets"],"table":true,"check":false,` +
		`"targetsAdded":1,"targetsRemoved":1}]}`
	if string(text) != want {
		t.Errorf("got\n%s\nwant\n%s", text, want)
	}
}
