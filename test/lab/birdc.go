package lab

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"
)

// command sends a command to the control socket of a BIRD, as `birdc -r` does, and returns the text
// of the reply. Tests ask too often to start a process each time, and with no bound but the context:
// a BIRD may stall.
func command(ctx context.Context, socket, command string) (string, error) {
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "unix", socket)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	reader := bufio.NewReader(conn)
	if _, err := readReply(reader); err != nil {
		return "", fmt.Errorf("failed to read the greeting: %w", err)
	}
	for _, line := range []string{"restrict", command} {
		if _, err = fmt.Fprintln(conn, line); err != nil {
			return "", err
		}
		var text string
		if text, err = readReply(reader); err != nil || line == command {
			return text, err
		}
	}
	return "", err
}

// readReply reads lines up to the last one of a reply: "1234 text", after "1234-text" and " text". The
// error is the text of a line with a code of 8000 or higher.
func readReply(reader *bufio.Reader) (string, error) {
	var text strings.Builder
	for {
		line, err := reader.ReadString('\n')
		if err != nil {
			return "", err
		}
		if line[0] == ' ' || line[0] == '+' {
			text.WriteString(line[1:])
			continue
		}
		if len(line) < 6 {
			return "", fmt.Errorf("failed to parse line %q of a reply", line)
		}
		text.WriteString(line[5:])
		switch {
		case line[4] == '-':
		case line[0] == '8' || line[0] == '9':
			return "", errors.New(strings.TrimSpace(text.String()))
		default:
			return text.String(), nil
		}
	}
}
