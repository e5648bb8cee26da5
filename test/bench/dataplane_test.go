package main

import (
	"encoding/binary"
	"net/netip"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

func TestDataPlaneTargetAddresses(t *testing.T) {
	const streams, targets = 100, 10
	made := planeStreams(0, streams, targets, tableSize, bothFamilies)
	network, vips, addresses := netip.MustParsePrefix(planeTargets4), vip.Set{}, map[netip.Addr]bool{}
	for _, s := range made {
		for _, v := range s.VIPs {
			vips[v] = struct{}{}
		}
		for _, x := range s.Targets {
			if len(x.IPs) != 2 || x.Roles != [...]plan.Role{plan.Serving, plan.Serving} ||
				!network.Contains(x.IPs[0]) {
				t.Fatalf("target %+v", x)
			}
			for _, a := range x.IPs {
				addresses[a] = true
			}
		}
	}
	if len(made) != streams || len(vips) != 2*streams || len(addresses) != 2*streams*targets {
		t.Errorf("%d streams, %d VIPs, %d addresses", len(made), len(vips), len(addresses))
	}
}

// A measurement changes a copy of the stream: the data plane may still hold the previous one.
func TestChangeKeepsStream(t *testing.T) {
	made := planeStreams(0, 1, 2, tableSize, oneFamily)
	s := made[streamName(0)]
	drains := withRole(s, 1, plan.Draining)
	more := withTarget(s, planeTarget(2, oneFamily))
	changed := with(made, drains)
	if s.Targets[1].Roles[vip.IPv4] != plan.Serving || len(s.Targets) != 2 || made[s.Name] != s {
		t.Errorf("the stream is now %+v", s)
	}
	if got := drains.Targets[1].Roles; got != [...]plan.Role{plan.Draining, plan.Down} {
		t.Errorf("roles %v: a family without an address stays down", got)
	}
	if len(more.Targets) != 3 || changed[s.Name] != drains {
		t.Error("the change is not there")
	}
}

func TestDiffers(t *testing.T) {
	w := &plan.Desired{Streams: planeStreams(0, 1, 1, tableSize, oneFamily)}
	s := w.Streams[streamName(0)]
	serving := map[string]struct{}{s.Targets[0].Name: {}}
	good := plan.State{
		VIPs:    map[vip.VIP]string{s.VIPs[0]: s.Name},
		Streams: map[string]*plan.StreamState{s.Name: {Serving: [2]map[string]struct{}{serving, nil}}},
	}
	if err := differs(w, good); err != nil {
		t.Error(err)
	}
	noVIP, noStream, noTarget := good, good, good
	noVIP.VIPs = nil
	noStream.Streams = nil
	noTarget.Streams = map[string]*plan.StreamState{s.Name: {}}
	for name, state := range map[string]plan.State{"VIP": noVIP, "stream": noStream, "target": noTarget} {
		if differs(w, state) == nil {
			t.Errorf("a missing %s is not seen", name)
		}
	}
}

func TestKernelMemory(t *testing.T) {
	for _, c := range []struct {
		info string
		want float64
		ok   bool
	}{
		{
			"Slab: 9999 kB\nSReclaimable: 1 kB\nSUnreclaim:  2048 kB\nVmallocTotal: 7 kB\nVmallocUsed:  1024 kB\n", 3,
			true,
		},
		{"SUnreclaim: 2048 kB\n", 0, false},
		{"SUnreclaim: many kB\nVmallocUsed: 1 kB\n", 0, false},
		{"", 0, false},
	} {
		got, err := kernelMemoryIn(c.info)
		if got != c.want || (err == nil) != c.ok {
			t.Errorf("memory in %q: %v, %v; want %v", c.info, got, err, c.want)
		}
	}
}

func TestIPv4HeaderChecksum(t *testing.T) {
	// A header with its checksum sums to all ones (RFC 1071, section 1).
	header := []byte{0x45, 0, 0, 46, 0, 0, 0, 0, 64, unix.IPPROTO_UDP, 0, 0, 169, 254, 100, 150, 20, 0, 0, 1}
	binary.BigEndian.PutUint16(header[10:], ^onesSum(header))
	if got := onesSum(header); got != 0xffff {
		t.Errorf("sum %#x", got)
	}
}

// The kernel steps through the messages by the size of its struct mmsghdr.
func TestMessageSize(t *testing.T) {
	if got := unsafe.Sizeof(multipleMessage{}); got != 64 && unsafe.Sizeof(uintptr(0)) == 8 {
		t.Errorf("%d bytes", got)
	}
}
