package e2e

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/test/lab"
	"github.com/vipgate/vipgate/test/load"
)

// shell runs a command line in the pod.
func (f *dataPlaneFixture) shell(line string) string {
	f.t.Helper()
	out, err := f.pod.Namespace().Run(f.ctx, "sh", "-c", line)
	f.must(err)
	return out
}

// remedies matches the remedy commands in the status of lb.
var remedies = regexp.MustCompile(`remedy: (sysctl .*)`)

// A fault that disables the whole data plane prevents the start. Wrong sysctls at the start are
// problems, and status names the commands that set them; after these commands the VIPs are
// forwarded.
func TestLBStartsWithWrongSysctls(t *testing.T) {
	t.Parallel()
	f := newDataPlaneFixture(t)
	refused, err := f.Start(f.pod.Namespace(), "lb",
		append([]string{"setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin"},
			f.pod.LBArgs("--dataplane=nftables")...)...)
	f.must(err)
	if status, err := refused.Wait(f.ctx); err != nil || status == 0 || !strings.Contains(refused.Output(), "NET_ADMIN") {
		t.Errorf("without CAP_NET_ADMIN lb ended with %d, %v\n%s", status, err, refused.Output())
	}
	if got := f.kernel(); strings.Contains(got, "vipgate-lb") {
		t.Errorf("an lb that refused left in the kernel\n%s", got)
	}
	for _, setting := range []string{
		"net.ipv4.ip_forward=0", "net.ipv6.conf.all.forwarding=0",
		"net.ipv4.fib_multipath_hash_policy=0", "net.ipv6.fib_multipath_hash_policy=0",
		"net.ipv4.conf.int0.rp_filter=1", "net.ipv4.conf.all.rp_filter=1",
		"net.ipv4.fwmark_reflect=1", "net.ipv6.fwmark_reflect=1",
	} {
		f.shell("sysctl -w " + setting)
	}
	f.must(f.pod.StartLB("--dataplane=nftables"))
	f.must(f.pod.StartFrontend("--ecmp"))
	f.waitOutput("remedy: sysctl -w net.ipv6.fib_multipath_hash_policy=1", "status")
	f.must(lab.Eventually(f.ctx, 10*time.Millisecond, func() error {
		status, err := f.lb("status")
		for _, command := range remedies.FindAllStringSubmatch(status, -1) {
			f.shell(command[1])
		}
		for _, v := range f.VIPs {
			via, viaErr := f.Via(v)
			if err = errors.Join(err, viaErr); err == nil && !slices.Equal(via, []int{1}) {
				err = fmt.Errorf("%s leads to the pods %v; status:\n%s", v, via, status)
			}
		}
		return err
	}))
	g, err := f.Load(f.ctx, 50, 4, load.Config{})
	f.must(err)
	defer g.Stop(f.ctx)
	f.must(errors.Join(g.WaitFlows(f.ctx), g.WaitTargets(f.ctx, "target-1", "target-2")))
}

// foreignMarks is the table of another program. It counts forwarded packets by that program's mark
// bits, and by connection tracking.
const foreignMarks = `table inet theirs {
	counter kept { }
	counter lost { }
	counter tracked { }
	counter untracked { }
	chain early {
		type filter hook prerouting priority -160
		meta mark set 0x7f000000
		ct mark set ct mark and 0x00ffffff or 0x7f000000
	}
	chain late {
		type filter hook forward priority 0
		ip daddr 20.0.0.1 goto there
		ip6 daddr 2000::1 goto there
		ip saddr 20.0.0.1 goto back
		ip6 saddr 2000::1 goto back
	}
	chain there {
		meta mark and 0xff000000 == 0x7f000000 counter name kept
		meta mark and 0xff000000 != 0x7f000000 counter name lost
		ct mark and 0xff000000 != 0x7f000000 counter name lost
		goto back
	}
	chain back {
		ct state untracked counter name untracked
		ct state != untracked counter name tracked
	}
}`

// counters returns the packet counts of the foreign table, by counter.
func (f *dataPlaneFixture) counters() map[string]int {
	f.t.Helper()
	counted := map[string]int{}
	counter := regexp.MustCompile(`counter (\w+) \{\s+packets (\d+)`)
	for _, m := range counter.FindAllStringSubmatch(f.shell("nft list counters table inet theirs"), -1) {
		n, err := strconv.Atoi(m[2])
		f.must(err)
		counted[m[1]] = n
	}
	return counted
}

// The connection mark stores the target in the bits of the mask only; --conntrack=off and loose
// create no entries. Mark bits that another process sets are preserved.
func TestForeignMarksAndStatelessMode(t *testing.T) {
	t.Parallel()
	for _, conntrack := range []string{"on", "off", "loose"} {
		t.Run("conntrack "+conntrack, func(t *testing.T) {
			t.Parallel()
			f := newDataPlaneFixture(t)
			f.shell("nft -f - <<'end'\n" + foreignMarks + "\nend")
			// Connections of the first checks through VIPs are tracked until the kernel state
			// exists.
			f.checkOwnAddresses()
			f.start("--conntrack=" + conntrack)
			f.waitOutput("confirmed   desired state", "status")
			f.shell("nft reset counters table inet theirs >/dev/null")
			g, err := f.Load(f.ctx, 50, 4, load.Config{})
			f.must(err)
			defer g.Stop(f.ctx)
			f.must(errors.Join(g.WaitFlows(f.ctx), g.WaitTargets(f.ctx, "target-1", "target-2")))
			got := f.counters()
			entries := strings.Count(f.shell("cat /proc/net/nf_conntrack"), "dst=20.0.0.1 ")
			t.Logf("%v, %d connections", got, entries)
			if got["kept"] == 0 || got["lost"] > 0 && conntrack == "on" {
				t.Errorf("bits of another program's marks are lost: %v", got)
			}
			// Those bits do not turn a known flow into an undecided one.
			if conntrack == "on" && strings.Contains(f.shell("nft list map ip vipgate-lb everyone"), "expires") {
				t.Error("all targets are asked about known flows")
			}
			if off := conntrack != "on"; off != (got["tracked"] == 0) || off != (got["untracked"] > 0) ||
				off != (entries == 0) {
				t.Errorf("--conntrack=%s: %v, %d connections of the VIP are known", conntrack, got, entries)
			}
		})
	}
}

// A draining target leaves the table immediately and keeps its established flows until they end or
// its drain time expires.
func TestDrainingTargetKeepsFlows(t *testing.T) {
	t.Parallel()
	f := newDataPlaneFixture(t)
	trench := strings.Replace(dataPlaneTrench(1, 2), "drainTime: 4s", "drainTime: 1h", 1)
	f.must(f.WriteTrench(trench))
	f.start()
	g, err := f.Load(f.ctx, 100, 16, load.Config{})
	f.must(err)
	defer g.Stop(f.ctx)
	f.must(errors.Join(g.WaitFlows(f.ctx), g.WaitTargets(f.ctx, "target-1", "target-2")))
	f.must(f.WriteTrench(regexp.MustCompile(`(target-2, .*)\}`).ReplaceAllString(trench, "$1, terminating: true}")))
	f.must(lab.Eventually(f.ctx, 10*time.Millisecond, func() error {
		out, err := f.lb("status")
		if err == nil && !regexp.MustCompile(`stream-a +target-2 +\d+ +draining +0 +0 `).MatchString(out) {
			err = fmt.Errorf("target-2 does not drain in the kernel:\n%s", out)
		}
		return err
	}))
	first, err := g.Take(f.ctx)
	f.must(err)
	f.must(g.WaitAnswered(f.ctx, 100))
	second, err := g.Take(f.ctx)
	f.must(err)
	if first.Failed+second.Failed > 0 || second.ByTarget["target-2"] > 0 {
		t.Errorf("%d and %d requests failed, answers %v", first.Failed, second.Failed, second.ByTarget)
	}
	kept := 0
	for _, flow := range append(first.Flows, second.Flows...) {
		if flow.Target == "target-2" {
			kept++
		}
		if flow.Broken != "" || flow.Exchanges == 0 {
			t.Errorf("the flow %d to %s had %d exchanges: %q", flow.Number, flow.Target, flow.Exchanges, flow.Broken)
		}
	}
	if kept == 0 {
		t.Error("no flow was with target-2, so that nothing is shown")
	}
}

// sctp is an SCTP packet with an INIT chunk (RFC 9260, sections 3.1 and 3.3.2).
func sctp(source, destination uint16) []byte {
	b := binary.BigEndian.AppendUint16(nil, source)
	b = binary.BigEndian.AppendUint16(b, destination)
	b = append(b, 0, 0, 0, 0, 0, 0, 0, 0) // verification tag, checksum
	b = append(b, 1, 0, 0, 20)
	b = binary.BigEndian.AppendUint32(b, 1+uint32(source)) // initiate tag
	b = append(b, 0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1)      // window, streams, first number
	binary.LittleEndian.PutUint32(b[8:], crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)))
	return b
}

// SCTP flows are distributed by their ports, and each keeps its target.
func TestSCTPPortSelection(t *testing.T) {
	t.Parallel()
	for name, flags := range map[string][]string{
		"conntrack on": {"--conntrack=on"}, "conntrack off": {"--conntrack=off"}, "fast path": fastPathFlags,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if name == "fast path" {
				requireFastPath(t)
			}
			f := newDataPlaneFixture(t)
			f.start(flags...)
			f.waitOutput("confirmed   desired state", "status")
			const flows = 40
			for _, v := range f.VIPs {
				var wires []*lab.Capture
				for _, a := range f.Targets {
					wires = append(wires, lab.NewCapture(t, a.NS, "net0"))
				}
				came := func() (counts []int, all int) {
					for _, c := range wires {
						n := c.Count(func(p lab.Packet) bool {
							return !p.Outgoing && p.Protocol == unix.IPPROTO_SCTP &&
								p.Dst == v
						})
						counts, all = append(counts, n), all+n
					}
					return counts, all
				}
				var once []int
				for round := 1; round <= 2; round++ {
					f.must(f.sendSCTP(v, flows))
					f.must(lab.Eventually(f.ctx, 10*time.Millisecond, func() error {
						if counts, all := came(); all < round*flows {
							return fmt.Errorf("%v of %d packets to %s came", counts, round*flows, v)
						}
						return nil
					}))
					counts, _ := came()
					if round == 1 {
						once = counts
					}
					for i, n := range counts {
						if n == 0 || n != round*once[i] {
							t.Errorf("%s, round %d: %v packets came to the targets; in the first %v", v, round, counts,
								once)
						}
					}
				}
			}
		})
	}
}

// sendSCTP makes clients begin flows to a VIP.
func (f *dataPlaneFixture) sendSCTP(vip netip.Addr, flows int) error {
	network := "ip4:132"
	if vip.Is6() {
		network = "ip6:132"
	}
	return f.Gateway.Do(func() error {
		c, err := (&net.Dialer{}).DialContext(context.WithoutCancel(f.ctx), network, vip.String())
		if err != nil {
			return err
		}
		for i := range flows {
			// A target without SCTP answers with ICMP, which is an error of the next packet.
			b := sctp(uint16(30000+i), 38412)
			if _, err := c.Write(b); err != nil {
				if _, err = c.Write(b); err != nil {
					return errors.Join(err, c.Close())
				}
			}
		}
		return c.Close()
	})
}
