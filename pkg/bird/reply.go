package bird

import (
	"bufio"
	"errors"
	"fmt"
	"strings"
)

const (
	// maxReplyLines bounds one reply, asynchronous lines included.
	maxReplyLines = 100_000
	// maxLine bounds one line of a reply; BIRD's own bound is 4 KiB.
	maxLine = 16 << 10
	// maxReplyBytes bounds one reply likewise. A gateway takes 2.3 KB of `show
	// protocols all` on BIRD 3.4.
	maxReplyBytes = 16 << 20
)

// Line is one line of a reply.
type Line struct {
	Code int
	Text string
}

// Reply is BIRD's answer to one command. The last line's code tells the outcome.
type Reply []Line

// Codes of replies (doc/reply_codes of BIRD).
const (
	codeShuttingDown = 6
	codeFailure      = 8000 // from here on the command failed
	codeConfigFailed = 8002 // the configuration does not parse
	codeNoMatch      = 8003 // `show protocols` of a pattern that fits none
)

// Code is the code of the last line, -1 without any.
func (r Reply) Code() int {
	if len(r) == 0 {
		return -1
	}
	return r[len(r)-1].Code
}

// RefusedError is BIRD's refusal of a command.
type RefusedError struct {
	Code int // 8000 and above
	Text string
}

func (e *RefusedError) Error() string { return fmt.Sprintf("BIRD refused (%04d): %s", e.Code, e.Text) }

// Err returns an error for the codes that tell a failure: a [*RefusedError] for
// those ≥ 8000, and another for 0006, "shutting down", though birdc exits 0 with it.
func (r Reply) Err() error {
	switch code := r.Code(); {
	case code == codeShuttingDown:
		return errors.New("BIRD is shutting down")
	case code >= codeFailure || code < 0:
		var text []string
		for _, l := range r {
			text = append(text, strings.TrimSpace(l.Text))
		}
		return &RefusedError{code, strings.Join(text, " ")}
	}
	return nil
}

// noCode is what ParseLine takes for previous at the beginning of a reply.
const noCode = -1

// ParseLine reads one line of BIRD's protocol, without its end. previous is the
// code that a continuation line, which begins with a space, belongs to; it is
// negative at the beginning of a reply, where such a line makes no sense. last
// is true for the line that ends a reply; async for lines that begin with "+"
// and can come anywhere.
func ParseLine(s string, previous int) (line Line, last, async bool, err error) {
	switch {
	case s == "":
		return Line{}, false, false, errors.New("an empty line")
	case s[0] == '+':
		return Line{Text: s[1:]}, false, true, nil
	case s[0] == ' ' && previous < 0:
		return Line{}, false, false, fmt.Errorf("%.40q continues nothing", s)
	case s[0] == ' ':
		return Line{Code: previous, Text: s[1:]}, false, false, nil
	case len(s) < 5 || (s[4] != '-' && s[4] != ' '):
		return Line{}, false, false, fmt.Errorf("%.40q does not begin with a code", s)
	}
	code := 0
	for _, c := range []byte(s[:4]) {
		if c < '0' || c > '9' {
			return Line{}, false, false, fmt.Errorf("%.40q does not begin with a code", s)
		}
		code = code*10 + int(c-'0')
	}
	return Line{Code: code, Text: s[5:]}, s[4] == ' ', false, nil
}

// ReadReply reads one reply. It takes bounded memory, whatever comes.
func ReadReply(r *bufio.Reader) (Reply, error) {
	var reply Reply
	code, size := noCode, 0
	for range maxReplyLines {
		s, err := readLine(r)
		if err != nil {
			return nil, err
		}
		if size += len(s); size > maxReplyBytes {
			return nil, fmt.Errorf("not BIRD's protocol: a reply of more than %d bytes", maxReplyBytes)
		}
		line, last, async, err := ParseLine(s, code)
		if err != nil {
			return nil, fmt.Errorf("not BIRD's protocol: %w", err)
		}
		if async {
			continue
		}
		code = line.Code
		reply = append(reply, line)
		if last {
			return reply, nil
		}
	}
	return nil, fmt.Errorf("not BIRD's protocol: a reply of more than %d lines", maxReplyLines)
}

// readLine reads a line and takes its end off.
func readLine(r *bufio.Reader) (string, error) {
	var line []byte
	for {
		piece, err := r.ReadSlice('\n')
		line = append(line, piece...)
		switch {
		case len(line) > maxLine:
			return "", fmt.Errorf("not BIRD's protocol: a line of more than %d bytes", maxLine)
		case err == nil:
			return strings.TrimRight(string(line), "\r\n"), nil
		case !errors.Is(err, bufio.ErrBufferFull):
			return "", err
		}
	}
}
