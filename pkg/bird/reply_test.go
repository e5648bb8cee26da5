package bird

import (
	"bufio"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"

	"github.com/vipgate/vipgate/test/harness"
)

func TestParseLine(t *testing.T) {
	for _, tt := range []struct {
		in       string
		previous int
		want     replyLine
		last     bool
		async    bool
		problem  string
	}{
		{in: "0001 BIRD 2.0.12 ready.", previous: noCode, want: replyLine{1, "BIRD 2.0.12 ready."}, last: true},
		{in: "1002-NBR-a BGP", previous: noCode, want: replyLine{1002, "NBR-a BGP"}},
		{in: "1006-", previous: 1002, want: replyLine{1006, ""}},
		{in: "0000 ", previous: 1006, want: replyLine{0, ""}, last: true},
		{in: "     Local AS:         8103", previous: 1006, want: replyLine{1006, "    Local AS:         8103"}},
		// Digits at the start of a continuation line are not a code.
		{in: " 8103 4248829953", previous: 1006, want: replyLine{1006, "8103 4248829953"}},
		{in: " ", previous: 1006, want: replyLine{1006, ""}},
		{in: "+some text", previous: noCode, want: replyLine{0, "some text"}, async: true},
		{in: " text", previous: noCode, problem: "without a line before it"},
		{in: "", previous: 1006, problem: "empty"},
		{in: "12", previous: noCode, problem: "has no reply code"},
		{in: "12345", previous: noCode, problem: "has no reply code"},
		{in: "12a4 text", previous: noCode, problem: "has no reply code"},
		{in: "8103,4248829953", previous: noCode, problem: "has no reply code"},
		{in: "HTTP/1.1 400 Bad Request", previous: noCode, problem: "has no reply code"},
		{in: "\x16\x03\x01\x00\x00", previous: noCode, problem: "has no reply code"},
	} {
		line, last, async, err := parseLine(tt.in, tt.previous)
		if tt.problem != "" {
			harness.WantError(t, err, tt.problem)
			continue
		}
		if err != nil || line != tt.want || last != tt.last || async != tt.async {
			t.Errorf("ParseLine(%q) = %+v, %v, %v, %v; want %+v, %v, %v", tt.in, line, last, async, err, tt.want, tt.last,
				tt.async)
		}
	}
}

const someReply = "2002-Name       Proto      Table      State  Since         Info\n" +
	"+asynchronous\n" +
	"1002-LB         BGP        ---        start  05:27:00.796  Passive       \n" +
	" NBR-a4     BGP        ---        up     05:27:01.682  Established   \n" +
	"+4248829953 8103\n" +
	"1006-  BGP state:          Established\r\n" +
	"     Neighbor AS:      8103\n" +
	"0000 \n"

var someLines = Reply{
	{2002, "Name       Proto      Table      State  Since         Info"},
	{1002, "LB         BGP        ---        start  05:27:00.796  Passive       "},
	{1002, "NBR-a4     BGP        ---        up     05:27:01.682  Established   "},
	{1006, "  BGP state:          Established"},
	{1006, "    Neighbor AS:      8103"},
	{0, ""},
}

// pieces is a reader that gives its strings one by one.
type pieces []string

func (p *pieces) Read(b []byte) (int, error) {
	for len(*p) > 0 && (*p)[0] == "" {
		*p = (*p)[1:]
	}
	if len(*p) == 0 {
		return 0, io.EOF
	}
	n := copy(b, (*p)[0])
	(*p)[0] = (*p)[0][n:]
	return n, nil
}

func TestSplitReplyIsReassembled(t *testing.T) {
	check := func(what string, r io.Reader) {
		t.Helper()
		got, err := readReply(bufio.NewReaderSize(r, 16))
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if diff := cmp.Diff(someLines, got); diff != "" {
			t.Fatalf("%s:\n%s", what, diff)
		}
	}
	for i := range len(someReply) + 1 {
		check("split in two", &pieces{someReply[:i], someReply[i:]})
	}
	check("byte by byte", iotest.OneByteReader(strings.NewReader(someReply)))
	check("with what follows", strings.NewReader(someReply+"0001 next\n"))
	for i := range len(someReply) {
		_, err := readReply(bufio.NewReader(strings.NewReader(someReply[:i])))
		if !errors.Is(err, io.EOF) {
			t.Fatalf("cut off after %d bytes: error %v, want EOF", i, err)
		}
	}
}

// endless repeats a string and counts the bytes read.
type endless struct {
	text  string
	taken int
}

func (e *endless) Read(b []byte) (int, error) {
	for i := range b {
		b[i] = e.text[(e.taken+i)%len(e.text)]
	}
	e.taken += len(b)
	return len(b), nil
}

func TestMalformedRepliesBoundedMemory(t *testing.T) {
	for name, tt := range map[string]struct {
		text    string
		problem string
		most    int
	}{
		"a line without an end":   {"0001-" + strings.Repeat("x", 100), "more than", 2 * maxLine},
		"zeros":                   {"\x00", "more than", 2 * maxLine},
		"lines without an end":    {"0001-x\n", "more than", 2 * 7 * maxReplyLines},
		"continuations":           {"1002-x\n y\n", "more than", 2 * 5 * maxReplyLines},
		"asynchronous lines only": {"+x\n", "more than", 2 * 3 * maxReplyLines},
		"long lines":              {"0001-" + strings.Repeat("x", maxLine-10) + "\n", "more than", maxReplyBytes + 2*maxLine},
		"empty lines":             {"\n", "empty line", 8192},
		"garbage":                 {"garbage\n", "has no reply code", 8192},
	} {
		t.Run(name, func(t *testing.T) {
			r := &endless{text: tt.text}
			reply, err := readReply(bufio.NewReader(r))
			if err == nil || !strings.Contains(err.Error(), tt.problem) {
				t.Fatalf("reply %v, error %v; want an error with %q", reply, err, tt.problem)
			}
			if r.taken > tt.most {
				t.Errorf("%d bytes were read", r.taken)
			}
		})
	}
}

func TestFailureCodes(t *testing.T) {
	for code, failure := range map[int]bool{
		0: false, 3: false, 4: false, 5: false, 6: true, 7: false, 13: false, 18: false, 19: false, 20: false, 1002: false,
		8000: true, 8002: true, 8003: true, 9000: true, 9001: true,
	} {
		err := Reply{{2, "Reading"}, {code, "text"}}.Err()
		if (err != nil) != failure {
			t.Errorf("code %04d: error %v", code, err)
		}
		var refused *refusedError
		if errors.As(err, &refused) != (code >= 8000) || refused != nil && refused.Code != code {
			t.Errorf("code %04d: %#v", code, err)
		}
	}
}
