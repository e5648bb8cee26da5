package speaker

import (
	"bytes"
	"encoding/json"
	"io"
	"net"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// answering is a connection to a bgpd that sends a text in parts of a size, and then closes.
type answering struct {
	net.Conn
	rest []byte
	part int
}

func (a *answering) Write(b []byte) (int, error) { return len(b), nil }

func (a *answering) Read(b []byte) (int, error) {
	if len(a.rest) == 0 {
		return 0, io.EOF
	}
	n := copy(b, a.rest[:min(a.part, len(a.rest))])
	a.rest = a.rest[n:]
	return n, nil
}

// FuzzFRR reads answers of bgpd: any bytes end in an answer or an error, and a complete answer does
// not depend on how the kernel splits it.
func FuzzFRR(f *testing.F) {
	f.Add([]byte("FRRouting 8.4.4 (host) on Linux(6.1).\r\n"), byte(0), byte(3))
	f.Add([]byte(`{"peers":{"169.254.100.150":{"state":"Established","pfxRcd":1}}}`), byte(0), byte(1))
	f.Add([]byte(`{"advertisedRoutes":{"2000::1/128":{},"::/0":{}}}`), byte(0), byte(7))
	f.Add([]byte("% Unknown command"), byte(2), byte(1))
	f.Add([]byte("cut off\x00\x00"), byte(0), byte(1))
	f.Fuzz(func(t *testing.T, text []byte, status, part byte) {
		for _, size := range []int{int(part) + 1, len(text) + 1} {
			_, _ = ask(&answering{rest: bytes.Clone(text), part: size}, "show version")
		}
		body := bytes.ReplaceAll(text, []byte{0}, nil)
		whole := append(bytes.Clone(body), 0, 0, 0, status)
		answer, err := ask(&answering{rest: bytes.Clone(whole), part: len(whole)}, "show version")
		if status == 0 && (err != nil || !bytes.Equal(answer, body)) || status != 0 && err == nil {
			t.Fatalf("status %d: %q, %v", status, answer, err)
		}
		type read struct {
			Summary frrSummary
			Routes  map[string]json.RawMessage
			Error   string
		}
		parse := func(size int) (r read) {
			var routes struct {
				Routes map[string]json.RawMessage `json:"advertisedRoutes"`
			}
			err := askJSON(&answering{rest: bytes.Clone(whole), part: size}, "show bgp summary json", &r.Summary)
			if err != nil {
				r.Error = err.Error()
			}
			_ = askJSON(&answering{rest: bytes.Clone(whole), part: size}, "show bgp summary json", &routes)
			r.Routes = routes.Routes
			return r
		}
		if diff := cmp.Diff(parse(len(whole)), parse(int(part)+1)); diff != "" {
			t.Fatalf("the answer depends on its parts of %d bytes:\n%s", int(part)+1, diff)
		}
		_ = parseVersion(string(body))
	})
}
