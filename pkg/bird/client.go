package bird

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// commandTimeout is how long BIRD may take to answer. It answers in 0.03 ms;
	// parsing a configuration of 10 000 lines blocks it for 18 ms.
	commandTimeout = 2 * time.Second
	// maxCommand is the longest command that is sent: longer input makes BIRD
	// drop the client or hang.
	maxCommand = 1000
	// maxReplyLines bounds one reply.
	maxReplyLines = 100_000
	// maxLine bounds one line of a reply.
	maxLine = 16 << 10
)

// Line is one line of a reply.
type Line struct {
	Code int
	Text string
}

// Reply is BIRD's answer to one command. The last line's code tells the outcome.
type Reply []Line

// Code is the code of the last line.
func (r Reply) Code() int {
	if len(r) == 0 {
		return -1
	}
	return r[len(r)-1].Code
}

// RefusedError is BIRD's refusal of a command.
type RefusedError struct {
	Code int
	Text string
}

func (e *RefusedError) Error() string { return fmt.Sprintf("BIRD refused (%04d): %s", e.Code, e.Text) }

// Err returns an error for the codes that tell a failure: a [*RefusedError] for
// those ≥ 8000, and another for 0006, "shutting down", though birdc exits 0 with it.
func (r Reply) Err() error {
	switch code := r.Code(); {
	case code == codeShuttingDown:
		return errors.New("BIRD is shutting down")
	case code >= 8000 || code < 0:
		var text []string
		for _, l := range r {
			text = append(text, strings.TrimSpace(l.Text))
		}
		return &RefusedError{code, strings.Join(text, " ")}
	}
	return nil
}

const codeShuttingDown = 6

// ParseLine reads one line of BIRD's protocol (doc/reply_codes of BIRD). previous
// is the code that a continuation line, which begins with a space, belongs to.
// last is true for the line that ends a reply; async for lines that begin with
// "+" and can come anywhere.
func ParseLine(s string, previous int) (line Line, last, async bool, err error) {
	switch {
	case s == "":
		return Line{}, false, false, errors.New("empty line")
	case s[0] == '+':
		return Line{Text: s[1:]}, false, true, nil
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

// ReadReply reads one reply. A line that does not fit r's buffer is an error, so
// that a peer that is not BIRD cannot make it grow.
func ReadReply(r *bufio.Reader) (Reply, error) {
	var reply Reply
	code := 0
	for len(reply) < maxReplyLines {
		s, err := r.ReadSlice('\n')
		if errors.Is(err, bufio.ErrBufferFull) {
			return nil, fmt.Errorf("a line of more than %d bytes", len(s))
		}
		if err != nil {
			return nil, err
		}
		line, last, async, err := ParseLine(strings.TrimRight(string(s), "\r\n"), code)
		if err != nil {
			return nil, err
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
	return nil, fmt.Errorf("a reply of more than %d lines", maxReplyLines)
}

// Client speaks to BIRD on its control socket, one command at a time. It is not
// safe for concurrent use. After an error it must be closed: an answer may
// still be under way.
type Client struct {
	// Version is what BIRD said in its greeting, such as "2.0.12".
	Version string
	// PID is the process that serves the socket, as the kernel knows it.
	PID int

	conn   net.Conn
	reader *bufio.Reader
}

// Dial connects and reads the greeting. ctx and 2 s bound it.
func Dial(ctx context.Context, socket string) (*Client, error) {
	ctx, cancel := context.WithTimeout(ctx, commandTimeout)
	defer cancel()
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
	if err != nil {
		return nil, fmt.Errorf("control socket of BIRD: %w", err)
	}
	c := &Client{conn: conn, reader: bufio.NewReaderSize(conn, maxLine)}
	if c.PID, err = peerPID(conn); err != nil {
		return nil, errors.Join(fmt.Errorf("control socket of BIRD: %w", err), conn.Close())
	}
	greeting, err := c.reply(ctx)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("greeting of BIRD on %s: %w", socket, err), conn.Close())
	}
	// "0001 BIRD 2.0.12 ready."
	if words := strings.Fields(greeting[len(greeting)-1].Text); len(words) >= 2 && words[0] == "BIRD" {
		c.Version = words[1]
	}
	return c, nil
}

// peerPID returns the process that listens on a unix socket (unix(7), SO_PEERCRED).
func peerPID(conn net.Conn) (int, error) {
	unixConn, ok := conn.(*net.UnixConn)
	if !ok {
		return 0, fmt.Errorf("%T is not a unix connection", conn)
	}
	raw, err := unixConn.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	var errCred error
	if err := raw.Control(func(fd uintptr) {
		cred, errCred = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return 0, err
	}
	if errCred != nil {
		return 0, fmt.Errorf("who serves it: %w", errCred)
	}
	return int(cred.Pid), nil
}

// Close ends the connection.
func (c *Client) Close() error { return c.conn.Close() }

// Command sends one command and returns BIRD's answer. The error is that of the
// connection, or the refusal of BIRD.
func (c *Client) Command(ctx context.Context, command string) (Reply, error) {
	if len(command) > maxCommand || strings.ContainsAny(command, "\r\n") {
		return nil, fmt.Errorf("command of %d bytes: at most %d on one line can be sent to BIRD", len(command), maxCommand)
	}
	ctx, cancel := context.WithTimeout(ctx, commandTimeout)
	defer cancel()
	if deadline, ok := ctx.Deadline(); ok {
		if err := c.conn.SetWriteDeadline(deadline); err != nil {
			return nil, fmt.Errorf("command to BIRD: %w", err)
		}
	}
	if _, err := c.conn.Write([]byte(command + "\n")); err != nil {
		return nil, fmt.Errorf("command %q to BIRD: %w", command, err)
	}
	reply, err := c.reply(ctx)
	if err != nil {
		return nil, fmt.Errorf("answer of BIRD to %q: %w", command, err)
	}
	if err := reply.Err(); err != nil {
		return reply, fmt.Errorf("%q: %w", command, err)
	}
	return reply, nil
}

// reply reads one reply; the end of ctx interrupts it.
func (c *Client) reply(ctx context.Context) (Reply, error) {
	if deadline, ok := ctx.Deadline(); ok {
		if err := c.conn.SetReadDeadline(deadline); err != nil {
			return nil, err
		}
	}
	stop := context.AfterFunc(ctx, func() { _ = c.conn.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	return ReadReply(c.reader)
}
