package announce

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"testing"
	"testing/iotest"

	"github.com/osrg/gobgp/v4/pkg/packet/bgp"

	"github.com/vipgate/vipgate/pkg/vip"
)

// header returns a message with a body; length and type may be invalid.
func header(length uint16, kind uint8, body ...byte) []byte {
	return append(append(bytes.Repeat([]byte{0xff}, 16), byte(length>>8), byte(length), kind), body...)
}

// readAll reads all messages of r.
func readAll(r io.Reader) (ms []*bgp.BGPMessage, err error) {
	in := bufio.NewReader(r)
	for {
		m, err := readMessage(in)
		if err != nil {
			return ms, err
		}
		ms = append(ms, m)
	}
}

// FuzzReadMessage checks that no input makes the reader panic or fail with an error that has no
// NOTIFICATION, that the split of the input into reads has no effect, and that a message survives
// encoding and decoding.
func FuzzReadMessage(f *testing.F) {
	e := testEncoder(f)
	var c changes
	for _, v := range []string{"20.0.0.1/32", "30.0.0.0/24", "2000::1/128"} {
		for a := Withdrawn; a <= Announced; a++ {
			c.add(vip.Require(v), a)
		}
	}
	updates := e.appendUpdates(nil, &c)
	cease, err := notification(bgp.BGP_ERROR_CEASE, bgp.BGP_ERROR_SUB_ADMINISTRATIVE_SHUTDOWN, []byte("maintenance"))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(slices.Concat(e.open, e.keepalive, updates, cease))
	f.Add(e.open)
	f.Add(e.keepalive)
	f.Add(header(23, bgp.BGP_MSG_ROUTE_REFRESH, 0, 1, 0, 1))
	f.Add(header(21, bgp.BGP_MSG_NOTIFICATION, 6, 2))
	f.Add([]byte("HTTP/1.1 400 Bad Request\r\n\r\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		ms, err := readAll(bytes.NewReader(b))
		var p *bgp.MessageError
		switch {
		case errors.As(err, &p):
			if _, err := notification(p.TypeCode, p.SubTypeCode, p.Data); err != nil || p.TypeCode == 0 || p.Message == "" {
				t.Fatalf("no NOTIFICATION for %+v: %v", p, err)
			}
		case !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF):
			t.Fatalf("unexpected kind of error: %v", err)
		}
		again, errAgain := readAll(iotest.OneByteReader(bytes.NewReader(b)))
		if errAgain.Error() != err.Error() || !reflect.DeepEqual(again, ms) {
			t.Fatalf("byte by byte: %v, %v; want %v, %v", again, errAgain, ms, err)
		}
		total := 0
		for _, m := range ms {
			total += int(m.Header.Len)
			switch body := m.Body.(type) {
			case *bgp.BGPOpen:
				hold, err := checkOpen(body, testOptions())
				if err == nil && (hold <= 0 || hold > testOptions().HoldTime) {
					t.Fatalf("hold time %v", hold)
				}
				if err != nil {
					continue
				}
				written := reencode(t, m).Body.(*bgp.BGPOpen)
				if again, err := checkOpen(written, testOptions()); err != nil || again != hold {
					t.Fatalf("accepted with %v, but not once it was written: %v, %v", hold, again, err)
				}
			case *bgp.BGPNotification:
				got := reencode(t, m).Body.(*bgp.BGPNotification)
				if got.ErrorCode != body.ErrorCode || got.ErrorSubcode != body.ErrorSubcode || !bytes.Equal(got.Data, body.Data) {
					t.Fatalf("%+v, want %+v", got, body)
				}
			case *bgp.BGPKeepAlive:
				reencode(t, m)
			case *bgp.BGPUpdate: // its body is skipped
			}
		}
		if total > len(b) {
			t.Fatalf("%d bytes were read of %d", total, len(b))
		}
	})
}

// reencode encodes a message and decodes it.
func reencode(t *testing.T, m *bgp.BGPMessage) *bgp.BGPMessage {
	t.Helper()
	// The codec corrects a wrong length, and the reader ignores data after an OPEN's parameters.
	b, err := (&bgp.BGPMessage{Header: bgp.BGPHeader{Type: m.Header.Type}, Body: m.Body}).Serialize()
	if err != nil {
		t.Fatalf("%+v cannot be written: %v", m.Body, err)
	}
	again, err := readMessage(bufio.NewReader(bytes.NewReader(b)))
	if err != nil || again.Header.Type != m.Header.Type || int(again.Header.Len) != len(b) {
		t.Fatalf("%+v was written as % x, which reads as %+v, %v", m.Body, b, again, err)
	}
	return again
}

// decisions decodes advertisements from bytes: an advertisement and a family, a length, and that
// many address bits each.
func decisions(b []byte) map[vip.VIP]Advertisement {
	want := make(map[vip.VIP]Advertisement)
	for len(b) >= 2 {
		kind, bits := b[0], int(b[1])
		b = b[2:]
		a, width := netip.IPv4Unspecified(), 4
		if kind&1 == 1 {
			a, width = netip.IPv6Unspecified(), 16
		}
		if bits > 8*width {
			bits = 8 * width
		}
		n := min((bits+7)/8, len(b))
		raw := a.AsSlice()
		copy(raw, b[:n])
		b = b[n:]
		a, _ = netip.AddrFromSlice(raw)
		p, err := a.Prefix(bits)
		if err != nil {
			continue
		}
		if v, err := vip.FromPrefix(p); err == nil {
			want[v] = Advertisement(kind >> 1 % 3)
		}
	}
	return want
}

// FuzzUpdates checks that the encoded UPDATEs, decoded by a BGP codec, equal the decisions, and
// that readMessage finds the same messages in them.
func FuzzUpdates(f *testing.F) {
	f.Add([]byte{0, 32, 20, 0, 0, 1, 5, 128, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1}, uint16(3))
	f.Add([]byte{4, 24, 30, 0, 0, 2, 8, 10, 0, 1, 128}, uint16(0))
	f.Add([]byte{5, 1, 0x80, 4, 1, 0x80}, uint16(2000))
	f.Fuzz(func(t *testing.T, b []byte, more uint16) {
		e := testEncoder(t)
		want := decisions(b)
		for i := range int(more % 2500) { // enough for more than one message
			want[numbered(i)] = Advertisement(more % 3)
		}
		written := encode(t, e, want)
		ms := split(t, written)
		got := make(map[vip.VIP]Advertisement)
		for _, m := range ms {
			applyUpdate(t, got, m.Body.(*bgp.BGPUpdate))
		}
		if !maps.Equal(got, want) {
			t.Fatalf("got %v, want %v", got, want)
		}
		read, err := readAll(bytes.NewReader(written))
		if !errors.Is(err, io.EOF) || len(read) != len(ms) {
			t.Fatalf("%d messages, %v; want %d", len(read), err, len(ms))
		}
		for i, m := range read {
			if m.Header.Len != ms[i].Header.Len || m.Header.Type != bgp.BGP_MSG_UPDATE {
				t.Fatalf("message %d: %+v, want %+v", i, m.Header, ms[i].Header)
			}
		}
	})
}
