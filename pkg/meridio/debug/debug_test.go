package debug

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

func TestDebugDocument(t *testing.T) {
	t.Setenv("NFE_TABLE_ID", "4096")
	t.Setenv("GATEWAY_PASSWORD", "do not show")
	ns := lab.NewNetNS(t)
	harness.Must(t, lab.Veth(ns, "ext", lab.NewNetNS(t), "peer"))
	ctx := harness.Context(t, time.Minute)
	const setup = `set -e
ip address add 169.254.100.2/24 dev ext
ip rule add from 20.0.0.1 fwmark 0x1000000/0xff000000 lookup 4096 priority 100 protocol 118
ip route add default via 169.254.100.1 dev ext table 4096
ip -6 route add blackhole default table 4097
ip neighbor add 169.254.100.1 lladdr 02:00:00:00:00:01 dev ext nud permanent`
	if out, err := ns.Run(ctx, "sh", "-c", setup); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	var document []byte
	harness.Must(t, ns.Do(func() (err error) {
		document, err = Document("1.2.3", 4096)
		return err
	}))
	var compact bytes.Buffer
	harness.Must(t, json.Compact(&compact, document))
	document = compact.Bytes()
	for _, want := range []string{
		`"meridio-version":"vipgate 1.2.3"`, `"unix-time":`, `"name":"ext"`, `"ips":["169.254.100.2/24"`,
		`"rx-packets":`,
		`{"destination":"","mark":16777216,"priority":100,"source":"20.0.0.1/32","table":4096,` +
			`"text":"ipv4 100: from 20.0.0.1/32 fwmark 0x1000000/0xff000000 lookup 4096 proto 118"}`,
		`"destination":"0.0.0.0/0","gateway":"169.254.100.1"`, `blackhole route to ::/0 metric 1024`,
		`"ip":"169.254.100.1","mac":"02:00:00:00:00:01","state":"PERMANENT"`, `"kernelVersion":"`,
		`"NFE_TABLE_ID=4096"`,
	} {
		if !strings.Contains(string(document), want) {
			t.Errorf("no %s", want)
		}
	}
	wantKeys(t, document)
	if strings.Contains(string(document), "do not show") {
		t.Error("the document has a variable of another program")
	}
	if t.Failed() {
		t.Logf("%s", document)
	}
}

// wantKeys compares the keys with the keys of Meridio's document, version v0.0.1.
func wantKeys(t *testing.T, document []byte) {
	t.Helper()
	var top map[string]json.RawMessage
	harness.Must(t, json.Unmarshal(document, &top))
	for key, inner := range map[string][]string{
		"version": nil, "meridio-version": nil, "unix-time": nil, "environment-variables": nil,
		"network-interfaces": {"index", "name", "mac", "ips", "mtu", "up", "master-index", "statistics"},
		"rules":              {"table", "priority", "mark", "source", "destination"},
		"route":              {"table", "interface-index", "destination", "nexthops", "gateway", "source"},
		"neighbors":          {"ip", "mac", "state", "interface-index"},
		"system":             {"cpu-info", "host-info"},
	} {
		value, ok := top[key]
		if !ok {
			t.Errorf("no %q", key)
			continue
		}
		if inner == nil {
			continue
		}
		var objects []map[string]any
		if key == "system" {
			value = []byte("[" + string(value) + "]")
		}
		if err := json.Unmarshal(value, &objects); err != nil || len(objects) == 0 {
			t.Errorf("%q: %v, %d objects", key, err, len(objects))
			continue
		}
		for _, name := range inner {
			if _, ok := objects[0][name]; !ok {
				t.Errorf("%q has no %q", key, name)
			}
		}
	}
}
