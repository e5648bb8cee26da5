package path

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// A router that knows the link address of the pod asks for nothing, and may send no advertisement.
func TestRoutersThatKnowThisPod(t *testing.T) {
	for _, known := range []bool{false, true} {
		t.Run(fmt.Sprintf("known %v", known), func(t *testing.T) {
			pod, gateway := lab.NewNetNS(t), lab.NewNetNS(t)
			harness.Must(t, lab.Veth(pod, "ext0", gateway, "pod0"))
			for _, ns := range []*lab.NetNS{pod, gateway} {
				harness.Must(t, ns.Sysctl("net.ipv6.conf.all.forwarding", "1"))
			}
			address := func(ns *lab.NetNS, device string) (a, mac string) {
				show := ns.Shell(t, "ip -o -6 addr show dev "+device+" scope link; ip -o link show dev "+device)
				words := strings.Fields(show)
				a, _, _ = strings.Cut(words[slices.Index(words, "inet6")+1], "/")
				return a, words[slices.Index(words, "link/ether")+1]
			}
			router, _ := address(gateway, "pod0")
			if known {
				own, mac := address(pod, "ext0")
				gateway.Shell(t, "ip neigh replace "+own+" lladdr "+mac+" dev pod0 nud permanent")
			}
			want := []netip.Addr{netip.MustParseAddr(router)}
			await.True(t, fmt.Sprintf("the router %s", router), func() bool {
				var routers []netip.Addr
				err := pod.Do(func() (err error) { routers, err = Routers("ext0"); return err })
				return err == nil && slices.Equal(routers, want)
			})
		})
	}
}

// Answers that do not end prolong no wait.
func TestRoutersEndsAmongAnswers(t *testing.T) {
	pod, neighbor := lab.NewNetNS(t), lab.NewNetNS(t)
	harness.Must(t, lab.Veth(pod, "ext0", neighbor, "pod0"))
	harness.Must(t, neighbor.Sysctl("net.ipv6.conf.all.forwarding", "0"))
	var fd, link int
	harness.Must(t, neighbor.Do(func() (err error) {
		if fd, err = unix.Socket(unix.AF_INET6, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_ICMPV6); err != nil {
			return err
		}
		device, err := net.InterfaceByName("pod0")
		link = device.Index
		return err
	}))
	defer unix.Close(fd)
	reply, all := []byte{129, 0, 0, 0, 0, 0, 0, 1}, netip.MustParseAddr("ff02::1").As16()
	send := func() error { return unix.Sendto(fd, reply, 0, &unix.SockaddrInet6{ZoneId: uint32(link), Addr: all}) }
	await.True(t, "the neighbor has an address", func() bool { return send() == nil })
	end := make(chan struct{})
	var sending sync.WaitGroup
	sending.Go(func() {
		// Each one comes before a wait of answerTime for it would end.
		every := time.NewTicker(answerTime / 2)
		defer every.Stop()
		for {
			select {
			case <-end:
				return
			case <-every.C:
				_ = send()
			}
		}
	})
	var routers []netip.Addr
	err := pod.Do(func() (err error) { routers, err = Routers("ext0"); return err })
	close(end)
	sending.Wait()
	harness.Must(t, err)
	if len(routers) > 0 {
		t.Errorf("routers %v", routers)
	}
}
