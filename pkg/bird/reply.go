package bird

import (
	"bufio"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

const (
	maxReplyLines = 100_000  // asynchronous lines included
	maxLine       = 16 << 10 // BIRD's own bound is 4 KiB
	maxReplyBytes = 16 << 20 // a gateway takes 2.3 KB of `show protocols all` on BIRD 3.4
	// maxScannedLines bounds a reply that is not kept: 200 000 VIPs with their attributes.
	maxScannedLines = 4_000_000
)

type replyLine struct {
	Code int
	Text string
}

// Reply is BIRD's answer to one command, at least one line. The last line's code is the outcome.
type Reply []replyLine

// Codes of replies (doc/reply_codes of BIRD).
const (
	codeShuttingDown = 6
	codeFailure      = 8000 // this and higher codes report a failed command
	codeConfigFailed = 8002 // the configuration does not parse
)

type refusedError struct {
	Code int // 8000 and above
	Text string
}

func (e *refusedError) Error() string { return fmt.Sprintf("BIRD refused (%04d): %s", e.Code, e.Text) }

// Err returns an error for the codes of a failure: a [*refusedError] from 8000 on, and an error for
// 0006, "shutting down", although birdc exits 0 on it.
func (reply Reply) Err() error {
	switch code := reply[len(reply)-1].Code; {
	case code == codeShuttingDown:
		return errors.New("BIRD is shutting down")
	case code >= codeFailure:
		var text []string
		for _, l := range reply {
			text = append(text, strings.TrimSpace(l.Text))
		}
		return &refusedError{code, strings.Join(text, " ")}
	}
	return nil
}

// noCode is the previous code for parseLine at the beginning of a reply.
const noCode = -1

// parseLine parses one line of BIRD's protocol, without its line end. previous is the code of the
// line before, which a continuation line (one that begins with a space) inherits, or noCode. last
// is true for the last line of a reply, async for lines that begin with "+", which may be anywhere.
func parseLine(s string, previous int) (line replyLine, last, async bool, err error) {
	switch {
	case s == "":
		return replyLine{}, false, false, errors.New("empty line")
	case s[0] == '+':
		return replyLine{Text: s[1:]}, false, true, nil
	case s[0] == ' ' && previous < 0:
		return replyLine{}, false, false, fmt.Errorf("continuation line %.40q without a line before it", s)
	case s[0] == ' ':
		return replyLine{Code: previous, Text: s[1:]}, false, false, nil
	case len(s) < 5 || (s[4] != '-' && s[4] != ' '):
		return replyLine{}, false, false, fmt.Errorf("line %.40q has no reply code", s)
	}
	code, err := strconv.ParseUint(s[:4], 10, 16)
	if err != nil {
		return replyLine{}, false, false, fmt.Errorf("line %.40q has no reply code", s)
	}
	return replyLine{Code: int(code), Text: s[5:]}, s[4] == ' ', false, nil
}

// readReply reads one reply in bounded memory.
func readReply(r *bufio.Reader) (reply Reply, err error) {
	size := 0
	err = scanReply(r, maxReplyLines, func(line replyLine) error {
		if size += len(line.Text); size > maxReplyBytes {
			return fmt.Errorf("malformed BIRD reply: more than %d bytes", maxReplyBytes)
		}
		reply = append(reply, line)
		return nil
	})
	if err != nil {
		return nil, err
	}
	return reply, nil
}

// scanReply passes the lines of one reply to a function, whose error ends it.
func scanReply(r *bufio.Reader, most int, each func(replyLine) error) error {
	code := noCode
	for range most {
		s, err := readLine(r)
		if err != nil {
			return err
		}
		line, last, async, err := parseLine(s, code)
		if err != nil {
			return fmt.Errorf("malformed BIRD reply: %w", err)
		}
		// Log lines of BIRD may arrive within a reply.
		if async {
			continue
		}
		code = line.Code
		if err := each(line); err != nil || last {
			return err
		}
	}
	return fmt.Errorf("malformed BIRD reply: more than %d lines", most)
}

func readLine(r *bufio.Reader) (string, error) {
	var line []byte
	for {
		piece, err := r.ReadSlice('\n')
		if line == nil {
			line = piece // not retained: it is copied below, or before the next read
		} else {
			line = append(line, piece...)
		}
		switch {
		case len(line) > maxLine:
			return "", fmt.Errorf("malformed BIRD reply: line of more than %d bytes", maxLine)
		case err == nil:
			return strings.TrimRight(string(line), "\r\n"), nil
		case !errors.Is(err, bufio.ErrBufferFull):
			return "", err
		}
		line = slices.Clone(line)
	}
}
