package bird

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"
)

// transcripts returns the recorded output of BIRD 2.0.12 to 3.4.0 in testdata: "control" is one
// conversation on the control socket, "stderr" the log.
func transcripts(t testing.TB, kind string) map[string]string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join("testdata", kind+"-*.txt"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no transcripts of %s: %v", kind, err)
	}
	texts := make(map[string]string)
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		texts[filepath.Base(f)] = string(b)
	}
	return texts
}

// repliesIn cuts a conversation into the texts of its replies.
func repliesIn(conversation string) []string {
	var replies []string
	from := 0
	for _, end := range regexp.MustCompile(`(?m)^\d{4} .*\n`).FindAllStringIndex(conversation, -1) {
		replies = append(replies, conversation[from:end[1]])
		from = end[1]
	}
	return replies
}

// inPieces reads data in pieces whose sizes are the bytes of cuts (0 means 256), and the
// remainder in one piece.
type inPieces struct {
	data, cuts []byte
}

func (p *inPieces) next() (piece []byte) {
	n := len(p.data)
	if len(p.cuts) > 0 {
		n, p.cuts = min(n, int(p.cuts[0]-1)+1), p.cuts[1:]
	}
	piece, p.data = p.data[:n], p.data[n:]
	return piece
}

func (p *inPieces) Read(b []byte) (int, error) {
	if len(p.data) == 0 {
		return 0, io.EOF
	}
	piece := p.next()
	n := copy(b, piece)
	if n < len(piece) {
		p.data = slices.Concat(piece[n:], p.data)
	}
	return n, nil
}

var firstOfReply = regexp.MustCompile(`^(?s)(\d{4})([- ])(.*)$`)

// replyByTheBook is a simple reference parser of BIRD's protocol. It returns the reply at the
// beginning of the text, nil without a reply, and the rest of the text.
func replyByTheBook(text string) (reply Reply, rest string) {
	code := ""
	for range maxReplyLines {
		line, after, whole := strings.Cut(text, "\n")
		if !whole || len(line) >= maxLine {
			return nil, ""
		}
		text, line = after, strings.TrimRight(line, "\r")
		if strings.HasPrefix(line, "+") {
			continue
		}
		if continued, ok := strings.CutPrefix(line, " "); ok && code != "" {
			n, _ := strconv.Atoi(code)
			reply = append(reply, replyLine{n, continued})
			continue
		}
		m := firstOfReply.FindStringSubmatch(line)
		if m == nil {
			return nil, ""
		}
		code = m[1]
		n, _ := strconv.Atoi(code)
		reply = append(reply, replyLine{n, m[3]})
		if m[2] == " " {
			return reply, text
		}
	}
	return nil, ""
}

// FuzzReadReply checks that the reply does not depend on how the bytes arrive, that it follows
// the protocol, and that no byte after the reply is consumed.
func FuzzReadReply(f *testing.F) {
	f.Add([]byte(someReply), []byte{1, 2, 3})
	f.Add([]byte("0001 BIRD 2.0.12 ready.\n"), []byte{4, 1})
	f.Add([]byte("+\n 1\n8103\n"), []byte{})
	f.Add([]byte("1002-x\n 8103 4248829953\n+8103 y\n0000 \n0001 z\n"), []byte{8, 4, 1, 16})
	for _, text := range transcripts(f, "control") {
		for _, reply := range repliesIn(text) {
			f.Add([]byte(reply), []byte{7, 64, 5})
		}
	}
	f.Fuzz(func(t *testing.T, data, cuts []byte) {
		want, rest := replyByTheBook(string(data))
		for how, r := range map[string]*bufio.Reader{
			"whole":              bufio.NewReader(bytes.NewReader(data)),
			"in pieces":          bufio.NewReader(&inPieces{data, cuts}),
			"in pieces, small":   bufio.NewReaderSize(&inPieces{data, cuts}, 16),
			"byte by byte":       bufio.NewReaderSize(iotest.OneByteReader(bytes.NewReader(data)), 32),
			"the end with bytes": bufio.NewReader(iotest.DataErrReader(&inPieces{data, cuts})),
		} {
			got, err := readReply(r)
			if (err == nil) != (want != nil) || !slices.Equal(got, want) {
				t.Fatalf("%s: %+v, %v; want %+v", how, got, err, want)
			}
			if err != nil {
				continue
			}
			if left, _ := io.ReadAll(r); string(left) != rest {
				t.Fatalf("%s: left %q, want %q", how, left, rest)
			}
			_ = got.Err()
		}
	})
}

// FuzzConversation sends arbitrary bytes as greeting and replies, in pieces at arbitrary times.
// Every command ends within its deadline, with the reply that was sent or with an error.
func FuzzConversation(f *testing.F) {
	f.Add([]byte(greeting+someReply), []byte{1, 200, 30})
	f.Add([]byte(greeting+"1002-x\n"), []byte{})
	f.Add([]byte(greeting+"0000 \n0000 \n8003 none\n"), []byte{24, 255, 255, 255, 255, 255, 255, 255})
	for _, text := range transcripts(f, "control") {
		f.Add([]byte(text[:1000]), []byte{23, 129, 60, 250})
	}
	f.Fuzz(func(t *testing.T, data, cuts []byte) {
		synctest.Test(t, func(t *testing.T) {
			ours, theirs := net.Pipe()
			written := make(chan struct{})
			go func() { // BIRD writes
				defer close(written)
				for p := (inPieces{data, cuts}); len(p.data) > 0; {
					if len(p.cuts) > 0 {
						<-time.After(time.Duration(p.cuts[0]>>6) * 300 * time.Millisecond)
					}
					if _, err := theirs.Write(p.next()); err != nil {
						return
					}
				}
			}()
			drained := make(chan struct{})
			go func() { defer close(drained); _, _ = io.Copy(io.Discard, theirs) }() // and reads
			defer func() { ours.Close(); theirs.Close(); <-written; <-drained }()

			text := string(data)
			expect := func(what string, begin time.Time, err error, same func(want Reply) bool) (goOn bool) {
				want, rest := replyByTheBook(text)
				text = rest
				took := time.Since(begin)
				switch {
				case took > commandTimeout:
					t.Fatalf("%s took %v", what, took)
				case errors.Is(err, os.ErrDeadlineExceeded):
					if took != commandTimeout {
						t.Fatalf("%s was given up after %v", what, took)
					}
					return false
				case want == nil:
					if err == nil {
						t.Fatalf("%s was answered, though %q is no reply", what, data)
					}
					return false
				case !same(want):
					t.Fatalf("%s: %v, want %+v", what, err, want)
				}
				return true
			}
			begin := time.Now()
			c, err := newClient(t.Context(), ours)
			if !expect("the greeting", begin, err, func(want Reply) bool { return (err == nil) == (want.Err() == nil) }) ||
				err != nil {
				return
			}
			for range 3 {
				begin := time.Now()
				reply, err := c.Command(t.Context(), "show status")
				if !expect("a command", begin, err, func(want Reply) bool {
					return slices.Equal(reply, want) && (err == nil) == (want.Err() == nil)
				}) {
					return
				}
			}
		})
	})
}

// linesOf returns a reply of all valid lines, so that one invalid line does not hide the valid
// ones.
func linesOf(text []byte) Reply {
	var reply Reply
	code := codeProtocol
	for line := range strings.Lines(string(text)) {
		if l, _, async, err := parseLine(strings.TrimRight(line, "\r\n"), code); err == nil && !async {
			reply = append(reply, l)
			code = l.Code
		}
	}
	return reply
}

// respaced returns the reply with other columns: the same words with different white space.
func respaced(r Reply, space string) Reply {
	var result Reply
	for _, l := range r {
		text := strings.Join(strings.Fields(l.Text), space)
		if strings.HasPrefix(l.Text, " ") {
			text = " " + space + text
		}
		result = append(result, replyLine{l.Code, text + space})
	}
	return result
}

// rendered formats protocols as BIRD does.
func rendered(list []Protocol) Reply {
	r := Reply{{2002, "Name Proto Table State Since Info"}}
	for _, p := range list {
		r = append(r, replyLine{
			codeProtocol,
			fmt.Sprintf("%-10s %-10s --- %-6s 2026-11-21 05:27:01 %s", p.Name, p.Proto, p.State, p.Info),
		})
		if p.BGPState != "" {
			r = append(r, replyLine{1006, "  BGP state:          " + p.BGPState})
		}
		if p.Neighbor.IsValid() {
			r = append(r, replyLine{1006, "    Neighbor address: " + p.Neighbor.String()})
		}
		if p.LastError != "" {
			r = append(r, replyLine{1006, "    Last error:       " + p.LastError})
		}
		if p.HasHoldTimer {
			r = append(r, replyLine{1006, fmt.Sprintf("    Hold timer:       %.9f/%d", p.HoldTimer.Seconds(),
				p.HoldTime/time.Second)})
		}
		for i, channel := range p.Channels {
			if channel == (Channel{}) {
				continue
			}
			// Details without a channel count for IPv4.
			if channel.Configured {
				r = append(r, replyLine{1006, "  Channel ipv" + []string{"4", "6"}[i]})
			}
			if channel.Up {
				r = append(r, replyLine{1006, "    State:          UP"})
			}
			if channel.ImportLimit > 0 || channel.LimitHit {
				limit := fmt.Sprintf("    Import limit:   %d", channel.ImportLimit)
				if channel.LimitHit {
					limit += " [HIT]"
				}
				r = append(r, replyLine{1006, limit})
			}
			r = append(r, replyLine{1006, fmt.Sprintf(
				"    Routes:         %d imported, 0 filtered, %d exported, 0 preferred", channel.Imported, channel.Exported)})
		}
	}
	return append(r, replyLine{})
}

// FuzzProtocols checks that the parser of protocol tables splits by words, keeps numbers in
// bounds, and returns the same protocols after formatting and parsing them again.
func FuzzProtocols(f *testing.F) {
	for _, text := range transcripts(f, "control") {
		for _, reply := range repliesIn(text) {
			if strings.Contains(reply, "1002-") {
				f.Add([]byte(reply))
			}
		}
	}
	f.Add([]byte("1002-NBR-a BGP --- up 2026-11-21 05:27:01 Established\n1006-  Routes: 1 imported, 2 exported\n Hold " +
		"timer: 1.5/3\n"))
	f.Add([]byte("1002-NBR-a BGP --- up 05:27:01\n1006-  Routes: -1 imported, 99999999999999999999 exported\n Hold " +
		"timer: nan/3\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		r := linesOf(text)
		before := slices.Clone(r)
		list := ParseProtocols(r)
		if !slices.Equal(r, before) {
			t.Fatal("the reply was changed")
		}
		heads := 0
		for _, l := range r {
			if l.Code == codeProtocol && !strings.HasPrefix(l.Text, " ") && len(strings.Fields(l.Text)) >= 4 {
				if heads >= len(list) || list[heads].Name != strings.Fields(l.Text)[0] {
					t.Fatalf("%q is not protocol %d of %+v", l.Text, heads, list)
				}
				heads++
			}
		}
		if len(list) != heads {
			t.Fatalf("%d protocols of %d heads", len(list), heads)
		}
		for _, p := range list {
			if p.Imported() < 0 || p.exported() < 0 || p.HoldTimer < 0 || p.HoldTimer > 65536*time.Second ||
				!p.HasHoldTimer && p.HoldTimer != 0 {
				t.Fatalf("out of bounds: %+v", p)
			}
			if p.Up() != (p.State == "up" && p.BGPState == "Established") {
				t.Fatalf("up: %+v", p)
			}
		}
		for _, space := range []string{" ", "\t", "          "} {
			if again := ParseProtocols(respaced(r, space)); !slices.Equal(again, list) {
				t.Fatalf("with other columns:\n%+v\n%+v", again, list)
			}
		}
		again := ParseProtocols(rendered(list))
		if !slices.EqualFunc(again, list, func(a, b Protocol) bool {
			near := (a.HoldTimer - b.HoldTimer).Abs() < time.Microsecond
			a.HoldTimer, b.HoldTimer = 0, 0
			return near && a == b
		}) {
			t.Fatalf("written down and read again:\n%+v\n%+v", again, list)
		}
	})
}

// FuzzBFD checks the same properties for tables of BFD sessions.
func FuzzBFD(f *testing.F) {
	for _, text := range transcripts(f, "control") {
		for _, reply := range repliesIn(text) {
			if strings.Contains(reply, "1020-") {
				f.Add([]byte(reply))
			}
		}
	}
	f.Add([]byte("1020-NBR-BFD:\n fe80::1%ext-vlan ext-vlan Init 2026-11-21 05:27:00 0.100 0.300 extra\n" +
		"2001:db8:: x Up\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		r := linesOf(text)
		sessions := parseBFD(r)
		again := Reply{{1020, "NBR-BFD:"}}
		for a, state := range sessions {
			if !a.IsValid() || a.Zone() != "" || state == "" {
				t.Fatalf("session %q with %q", a, state)
			}
			if !slices.ContainsFunc(r, func(l replyLine) bool {
				words := strings.Fields(l.Text)
				if len(words) < 3 || words[2] != state {
					return false
				}
				x, err := netip.ParseAddr(words[0])
				return err == nil && x.WithZone("") == a
			}) {
				t.Fatalf("no line reports that %s is %q", a, state)
			}
			again = append(again,
				replyLine{1020, fmt.Sprintf(" %-25s %-10s %-10s 05:27:00.796    0.100    0.300", a, "ext-vlan", state)})
		}
		for how, r := range map[string]Reply{"with other columns": respaced(r, "\t"), "once more": r, "written down": again} {
			if got := parseBFD(r); !maps.Equal(got, sessions) {
				t.Fatalf("%s: %v, want %v", how, got, sessions)
			}
		}
	})
}

// logByTheBook is a reference implementation of drainLines: lines are truncated at the size of
// the buffer.
func logByTheBook(text string) (events []stateEvent) {
	for line := range strings.Lines(text) {
		switch line, whole := strings.CutSuffix(line, "\n"); {
		case len(line) >= maxEventLine:
			// bufio keeps a CR at the very end for the LF that may follow.
			events = append(events, parseEvent(strings.TrimSuffix(line[:maxEventLine], "\r")))
		case whole:
			events = append(events, parseEvent(strings.TrimSuffix(line, "\r")))
		default:
			events = append(events, parseEvent(line))
		}
	}
	return events
}

// FuzzLog checks that arbitrary input in BIRD's log is drained even if no line is received, and
// that the events match the lines.
func FuzzLog(f *testing.F) {
	for _, text := range transcripts(f, "stderr") {
		f.Add([]byte(text), []byte{255, 1, 80}, uint32(0))
	}
	f.Add([]byte("2026-11-21 05:27:28.146 <FATAL> Shutdown completed"), []byte{3}, uint32(5000))
	f.Add([]byte("\r\n\n\r\r\n<ERR> a: b\r"), []byte{1, 1, 1}, uint32(4094))
	f.Add([]byte{0xff, '\n', 0}, []byte{}, uint32(1<<20))
	f.Fuzz(func(t *testing.T, data, cuts []byte, long uint32) {
		// What comes, a very long piece of a line, and the same again.
		text := slices.Concat(data, bytes.Repeat([]byte{'x'}, int(long%(1<<18))), data)
		want := logByTheBook(string(text))
		const room = 5
		lines := make(chan logged, room)
		r := &inPieces{text, cuts}
		var got []stateEvent
		last := drainLines(r, lines, func(e stateEvent) { got = append(got, e) })
		if len(r.data) > 0 {
			t.Fatalf("%d bytes stay in the pipe", len(r.data))
		}
		if !slices.Equal(got, want) {
			t.Fatalf("%+v, want %+v", got, want)
		}
		complaint := ""
		for _, e := range want {
			if e.isError() {
				complaint = e.Text
			}
			if e.Level != "" && !slices.Contains(levels, e.Level) || len(e.Text)+len(e.Protocol) > maxEventLine {
				t.Fatalf("%+v", e)
			}
		}
		if last != complaint {
			t.Fatalf("the last complaint is %q, want %q", last, complaint)
		}
		kept := make(chan logged, room)
		for e := range lines { // it is closed
			kept <- e
		}
		close(kept)
		if len(kept) != min(room, len(want)) {
			t.Fatalf("%d of %d lines were kept", len(kept), len(want))
		}
		logLines(kept, slog.New(slog.NewTextHandler(io.Discard, &slog.HandlerOptions{Level: slog.LevelDebug})), true)
	})
}

// TestTablesOfEveryVersion parses the replies of BIRD 2.0.12 to 3.4.0 in the same situation.
func TestTablesOfEveryVersion(t *testing.T) {
	for name, text := range transcripts(t, "control") {
		t.Run(name, func(t *testing.T) {
			var protocols []Protocol
			var bfd map[netip.Addr]string
			for _, reply := range repliesIn(text) {
				r := replyOf(t, reply)
				if strings.Contains(reply, "1002-") && protocols == nil {
					protocols = ParseProtocols(r)
				}
				if strings.Contains(reply, "1020-") && bfd == nil {
					bfd = parseBFD(r)
				}
			}
			got := map[string]string{}
			for _, p := range protocols {
				if p.Up() != p.HasHoldTimer {
					t.Errorf("%+v", p)
				}
				got[p.Name] = fmt.Sprintf("%s %v %d %d", p.Proto, p.Up(), p.Imported(), p.exported())
			}
			want := map[string]string{
				"device1": "Device false 0 0", "LB": "BGP false 0 0", "KERNEL4": "Kernel false 0 1", "KERNEL6": "Kernel false 0 1",
				"STATIC4": "Static false 2 0", "STATIC6": "Static false 1 0", "NBR-BFD": "BFD false 0 0",
				"NBR-a4": "BGP true 1 2", "NBR-a6": "BGP true 1 1", "NBR-ibgp": "BGP false 0 0", "NBR-gone": "BGP false 0 0",
				"NBR-off.subnet": "BGP false 0 0",
			}
			if !maps.Equal(got, want) {
				t.Errorf("%v\nwant %v", got, want)
			}
			wantBFD := map[netip.Addr]string{
				netip.MustParseAddr("169.254.100.150"): "Up", netip.MustParseAddr("fd00:100::150"): "Up",
				netip.MustParseAddr("169.254.100.99"): "Down",
			}
			if !maps.Equal(bfd, wantBFD) {
				t.Errorf("%v", bfd)
			}
		})
	}
}
