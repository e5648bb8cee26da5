package lab

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"
)

// controlTimeout bounds each command on a control socket.
const controlTimeout = 5 * time.Second

// Control is a connection to the control socket of a gateway's BIRD. It shares no code with the
// product's client, which the tests check. It is not safe for concurrent use.
type Control struct {
	conn net.Conn
	in   *bufio.Reader
}

// Control connects to the gateway's BIRD. The caller closes it.
func (g *Gateway) Control(ctx context.Context) (*Control, error) {
	conn, err := (&net.Dialer{Timeout: controlTimeout}).DialContext(ctx, "unix", g.socket)
	if err != nil {
		return nil, fmt.Errorf("control socket of gateway %s: %w", g.Name, err)
	}
	c := &Control{conn: conn, in: bufio.NewReader(conn)}
	if _, err := c.reply(); err != nil {
		conn.Close()
		return nil, fmt.Errorf("greeting of gateway %s: %w", g.Name, err)
	}
	return c, nil
}

// Command sends a command and returns BIRD's reply as birdc shows it. A reply with
// a failure code is an error.
func (c *Control) Command(command string) (string, error) {
	if err := c.conn.SetDeadline(time.Now().Add(controlTimeout)); err != nil {
		return "", fmt.Errorf("%s: %w", command, err)
	}
	if _, err := c.conn.Write([]byte(command + "\n")); err != nil {
		return "", fmt.Errorf("%s: %w", command, err)
	}
	out, err := c.reply()
	if err != nil {
		return "", fmt.Errorf("%s: %w", command, err)
	}
	return out, nil
}

// reply reads one answer: lines "NNNN-text" and " text", up to "NNNN text".
func (c *Control) reply() (string, error) {
	var out strings.Builder
	for {
		line, err := c.in.ReadString('\n')
		if err != nil {
			return "", err
		}
		if line[0] == '+' {
			continue // an asynchronous message, not part of the reply
		}
		if line[0] == ' ' {
			out.WriteString(line[1:])
			continue
		}
		if len(line) < 5 {
			return "", fmt.Errorf("not a line of BIRD: %q", line)
		}
		code, err := strconv.Atoi(line[:4])
		if err != nil {
			return "", fmt.Errorf("not a line of BIRD: %q", line)
		}
		out.WriteString(line[5:])
		if line[4] == '-' {
			continue
		}
		if code >= 8000 {
			return "", fmt.Errorf("BIRD says %04d: %s", code, strings.TrimSpace(line[5:]))
		}
		return out.String(), nil
	}
}

// Close closes the connection.
func (c *Control) Close() error { return c.conn.Close() }
