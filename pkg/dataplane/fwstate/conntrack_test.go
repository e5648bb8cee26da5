package fwstate

import (
	"fmt"
	"net"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/test/lab"
)

func TestFullTable(t *testing.T) {
	for _, tt := range []struct {
		count, limit float64
		want         bool
	}{{24, 100, false}, {25, 100, true}, {26, 100, true}, {1000, 0, false}, {0, 0, false}} {
		if got := full(tt.count, tt.limit, 0.25); got != tt.want {
			t.Errorf("%v of %v: %v", tt.count, tt.limit, got)
		}
	}
}

// Only entries with marks of a block are deleted. Adjacent marks and bits outside the mask are
// preserved.
func TestDeletedEntriesHaveExactMarks(t *testing.T) {
	ns := lab.NewNetNS(t)
	f := openConn(t, ns, Config{})
	ns.Shell(t, `ip link set lo up
		nft add table inet test
		nft 'add chain inet test out { type filter hook output priority 0; }'
		nft add rule inet test out udp dport 5000-5020 ct mark set udp dport map '{ `+marked(5000, 5020)+` }'`)
	if ns.Shell(t, "ls /proc/net/nf_conntrack 2>/dev/null || true") == "" {
		lab.Skip(t, "a kernel that lists its connections (CONFIG_NF_CONNTRACK_PROCFS)")
	}
	must(t, ns.Do(func() error {
		for port := 5000; port <= 5020; port++ {
			c, err := net.Dial("udp", fmt.Sprintf("127.0.0.1:%d", port))
			if err != nil {
				return err
			}
			if _, err := c.Write([]byte("x")); err != nil {
				return err
			}
			if err := c.Close(); err != nil {
				return err
			}
		}
		return nil
	}))
	var numbers []uint32
	for n := uint32(5003); n <= 5014; n++ {
		numbers = append(numbers, n)
	}
	must(t, f.FlushConntrack(numbers))
	out := ns.Shell(t, "cat /proc/net/nf_conntrack")
	for port := 5000; port <= 5020; port++ {
		if got, want := strings.Contains(out, fmt.Sprintf("dport=%d ", port)), port < 5003 || port > 5014; got != want {
			t.Errorf("the entry of mark %d is there: %v, want %v", port, got, want)
		}
	}
}

// marked maps ports to marks of the same number, with a bit that belongs to another process.
func marked(from, to int) string {
	var list []string
	for n := from; n <= to; n++ {
		list = append(list, fmt.Sprintf("%d : %#x", n, 0x01000000|n))
	}
	return strings.Join(list, ", ")
}
