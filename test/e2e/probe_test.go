package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
	"github.com/vipgate/vipgate/test/traffic"
)

// probePorts is the number of source ports, enough for each of three pods with both families.
const probePorts = 16

// probed is the output of vipgate-probe run --once -o json.
type probed struct {
	VIPs []struct {
		VIP, State string
		Paths      []struct{ Source, State, Reason, LastHop string }
	}
}

// wantPaths compares the dead paths of the metrics of vipgate-probe, such as "20.0.0.1/32 31004",
// with the wanted ones.
func wantPaths(page string, want []string) error {
	if !strings.Contains(page, `vipgate_probe_paths{state="unknown"} 0`) {
		return fmt.Errorf("some paths are unknown")
	}
	var dead []string
	for line := range strings.Lines(page) {
		if labels, found := strings.CutPrefix(line, "vipgate_probe_dead_path{"); found {
			_, source, _ := strings.Cut(labels, `source="`)
			source, _, _ = strings.Cut(source, `"`)
			_, vip, _ := strings.Cut(labels, `vip="`)
			vip, _, _ = strings.Cut(vip, `"`)
			dead = append(dead, vip+source[strings.LastIndex(source, ":"):])
		}
	}
	if slices.Sort(dead); !slices.Equal(dead, want) {
		return fmt.Errorf("dead are %q, want %q", dead, want)
	}
	return nil
}

// usersBeyond returns the namespace of users, whose packets to the VIPs the gateways spread over
// the pods by addresses and ports.
func usersBeyond(t *testing.T, trench *traffic.Trench) *lab.NetNS {
	t.Helper()
	users, err := lab.Create(lab.WithoutDAD)
	harness.Must(t, err)
	t.Cleanup(func() { harness.Check(t, users.Close()) })
	harness.Must(t, lab.Veth(users, "uplink", trench.Gateway, "users"))
	harness.Must(t, users.Addr("uplink", "198.51.100.2/24", "2001:db8:100::2/64"))
	harness.Must(t, trench.Gateway.Addr("users", "198.51.100.1/24", "2001:db8:100::1/64"))
	harness.Must(t, users.Batch("route add default via 198.51.100.1", "route add default via 2001:db8:100::1"))
	// Replies may leave through the second gateway.
	harness.Must(t, trench.Second.Batch("route replace 198.51.100.0/24 via "+lab.GatewayA4.String(),
		"route replace 2001:db8:100::/64 via "+lab.GatewayA6.String()))

	// As routers do, the gateways hash addresses and ports: by default the kernel takes the hash of the
	// user's socket, which differs from connection to connection.
	for _, gateway := range []*lab.NetNS{trench.Gateway, trench.Second} {
		for _, family := range []string{"net.ipv4", "net.ipv6"} {
			harness.Must(t, gateway.Sysctl(family+".fib_multipath_hash_policy", "3"))
			harness.Must(t, gateway.Sysctl(family+".fib_multipath_hash_fields", "55")) // 0x37
		}
	}
	return users
}

// A pod advertises VIPs, passes its own checks, and drops the packets of users: the probe beyond the
// gateway names exactly the source ports that the gateway sends to that pod. Then all pods drop the
// packets to one VIP, and the other one stays reachable.
func TestProbeFindsBlackHole(t *testing.T) {
	t.Parallel()
	lab.Need(t, "curl")
	ctx, trench := openTrench(t, traffic.Options{Targets: 2})
	users := usersBeyond(t, trench)
	flags := []string{
		"run", "--trench-file=" + trench.Pods[0].TrenchFile(), fmt.Sprintf("--ports=%d", probePorts),
		"--admin-socket=unix://" + filepath.Join(trench.Dir, "probe.sock"),
	}
	program := filepath.Join(binaries, "vipgate-probe")
	process, err := trench.Start(users, "vipgate-probe", append([]string{program}, flags...)...)
	harness.Must(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("== vipgate-probe\n%s", process.Tail(40))
		}
		harness.Check(t, lab.Stop(context.WithoutCancel(ctx), process))
	})
	const state4 = `vipgate_probe_vip_state{family="ipv4",vip="20.0.0.1/32"} `
	const state6 = `vipgate_probe_vip_state{family="ipv6",vip="2000::1/128"} `
	want := func(step string, dead []string) string {
		t.Helper()
		began, page := time.Now(), ""
		slices.Sort(dead)
		limited, cancel := context.WithTimeout(ctx, waitTimeout)
		defer cancel()
		err := lab.Eventually(limited, 50*time.Millisecond, func() (err error) {
			if page, err = users.Run(limited, "curl", "-sS", "http://127.0.0.1:2227/metrics"); err != nil {
				return err
			}
			return wantPaths(page, dead)
		})
		t.Logf("%s: %v", step, time.Since(began))
		if err != nil {
			t.Fatalf("%s: %v\n%s", step, err, page)
		}
		return page
	}
	page := want("all paths reachable", nil)
	for _, state := range []string{
		state4 + "2", state6 + "2",
		fmt.Sprintf(`vipgate_probe_paths{state="reachable"} %d`, 2*probePorts),
	} {
		if !strings.Contains(page, state) {
			t.Errorf("no %s in\n%s", state, page)
		}
	}

	// Each pod lists the source ports that it gets.
	through := make([][]string, len(trench.Pods))
	for _, pod := range trench.Pods {
		_, err := pod.NS.Run(ctx, "nft", `table inet seen { set ipv4 { type inet_service; flags dynamic; }; `+
			`set ipv6 { type inet_service; flags dynamic; }; chain seen { type filter hook prerouting priority -410; `+
			`iifname "`+lab.External+`" ip daddr 20.0.0.1 tcp flags syn update @ipv4 { tcp sport }; `+
			`iifname "`+lab.External+`" ip6 daddr 2000::1 tcp flags syn update @ipv6 { tcp sport }; }; }`)
		harness.Must(t, err)
	}
	harness.Must(t, lab.Eventually(ctx, 50*time.Millisecond, func() error {
		total := 0
		for n, pod := range trench.Pods {
			through[n] = nil
			for vip, set := range map[string]string{"20.0.0.1/32": "ipv4", "2000::1/128": "ipv6"} {
				out, err := pod.NS.Run(ctx, "nft", "list set inet seen "+set)
				if err != nil {
					return err
				}
				for _, port := range regexp.MustCompile(`\b310\d\d\b`).FindAllString(out, -1) {
					through[n] = append(through[n], vip+":"+port)
				}
			}
			slices.Sort(through[n])
			total += len(through[n])
		}
		if total != 2*probePorts {
			return fmt.Errorf("%d of %d paths seen: %q", total, 2*probePorts, through)
		}
		return nil
	}))
	t.Logf("paths by pod: %q", through)
	hole := func(pod *lab.Pod, match string) {
		_, err := pod.NS.Run(ctx, "nft", `table inet hole { chain hole { type filter hook prerouting priority -400; `+
			`iifname "`+lab.External+`" `+match+` drop; }; }`)
		harness.Must(t, err)
	}
	fill := func(pod *lab.Pod) {
		_, err := pod.NS.Run(ctx, "nft", "delete table inet hole")
		harness.Must(t, err)
	}
	second := trench.Pods[1]
	hole(second, "tcp dport 5000")
	page = want("a pod of three drops packets", through[1])
	for _, line := range []string{state4 + "1", state6 + "1"} {
		if !strings.Contains(page, line) {
			t.Errorf("no %s in\n%s", line, page)
		}
	}
	// Each pod still advertises both VIPs: only the probe knows.
	harness.Must(t, trench.WantVia(ctx, 1, 2, 3))
	out, err := users.Run(ctx, program, append(slices.Clone(flags), "--once", "-o", "json")...)
	var once probed
	if err == nil || json.Unmarshal([]byte(out[:strings.LastIndex(out, "}")+1]), &once) != nil || len(once.VIPs) != 2 {
		t.Fatalf("--once: %v\n%s", err, out)
	}
	var dead []string
	hops := map[string]bool{}
	for _, v := range once.VIPs {
		for _, path := range v.Paths {
			if path.State == "dead" {
				dead = append(dead, v.VIP+path.Source[strings.LastIndex(path.Source, ":"):])
				hops[path.LastHop] = true
			}
		}
	}
	if slices.Sort(dead); !slices.Equal(dead, through[1]) {
		t.Errorf("--once: dead are %q, want %q\n%s", dead, through[1], out)
	}
	// The pod drops, so that the last answer is of the gateway, which limits its rate of ICMP.
	delete(hops, "")
	if got := slices.Sorted(maps.Keys(hops)); !slices.Equal(got, []string{
		"198.51.100.1 (hop 1)", "2001:db8:100::1 (hop 1)",
	}) {
		t.Errorf("the last answers are of %q", got)
	}
	fill(second)
	want("the pod forwards again", nil)

	var all []string
	for _, paths := range through {
		for _, path := range paths {
			if strings.HasPrefix(path, "2000::1") {
				all = append(all, path)
			}
		}
	}
	for _, pod := range trench.Pods {
		hole(pod, "ip6 daddr 2000::1 tcp dport 5000")
	}
	page = want("all pods drop the packets to a VIP", all)
	for _, line := range []string{state4 + "2", state6 + "0"} {
		if !strings.Contains(page, line) {
			t.Errorf("no %s in\n%s", line, page)
		}
	}
}
