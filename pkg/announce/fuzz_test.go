package announce

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"reflect"
	"slices"
	"testing"
	"testing/iotest"

	"github.com/osrg/gobgp/v4/pkg/packet/bgp"
	"pgregory.net/rapid"

	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
)

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
			c.add(vip.Require(v), Route{Advertisement: a})
		}
	}
	updates := e.appendUpdates(nil, &c, bothFamilies)
	cease, err := notification(bgp.BGP_ERROR_CEASE, bgp.BGP_ERROR_SUB_ADMINISTRATIVE_SHUTDOWN, []byte("maintenance"))
	harness.Must(f, err)
	f.Add(slices.Concat(e.open, e.keepalive, updates, cease))
	f.Add(e.open)
	f.Add(e.keepalive)
	f.Add(newMessage(bgp.BGP_MSG_ROUTE_REFRESH, 0, 1, 0, 1))
	f.Add(newMessage(bgp.BGP_MSG_NOTIFICATION, 6, 2))
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
				hold, _, err := checkOpen(body, testOptions())
				if err == nil && (hold <= 0 || hold > testOptions().HoldTime) {
					t.Fatalf("hold time %v", hold)
				}
				if err != nil {
					continue
				}
				written := reencode(t, m).Body.(*bgp.BGPOpen)
				if again, _, err := checkOpen(written, testOptions()); err != nil || again != hold {
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

// FuzzUpdates checks checkUpdates with inputs that the fuzzer guides.
func FuzzUpdates(f *testing.F) {
	f.Fuzz(rapid.MakeFuzz(checkUpdates(testEncoder(f))))
}
