package bird

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/task"
)

const (
	// commandTimeout bounds the wait for an answer, which takes 18 ms for 10 000 lines to parse.
	commandTimeout = 2 * time.Second
	// maxCommand is the longest command: longer input makes BIRD drop the client or hang.
	maxCommand = 1000
)

// Client sends commands to BIRD's control socket, one at a time. It is not safe for concurrent use.
// After an error that is not a refusedError the caller must close it: a late answer would be read
// as the answer to the next command.
type Client struct {
	Version string // from BIRD's greeting, such as "2.0.12"
	PID     int    // the process that serves the socket, from SO_PEERCRED

	conn   net.Conn
	reader *bufio.Reader
}

// Dial connects and reads the greeting; ctx and commandTimeout bound it.
func Dial(ctx context.Context, socket string) (*Client, error) {
	ctx, cancel := task.WithAwakeTimeout(ctx, commandTimeout)
	defer cancel()
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
	if err != nil {
		return nil, fmt.Errorf("failed to connect to BIRD's control socket: %w", err)
	}
	peer, err := identity.PeerProcess(conn)
	if err != nil {
		err = fmt.Errorf("failed to identify the process on BIRD's control socket: %w", err)
		return nil, errors.Join(err, conn.Close())
	}
	client, err := newClient(ctx, conn)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("failed to read BIRD's greeting on %s: %w", socket, err), conn.Close())
	}
	client.PID = int(peer.Pid)
	return client, nil
}

func newClient(ctx context.Context, conn net.Conn) (*Client, error) {
	client := &Client{conn: conn, reader: bufio.NewReader(conn)}
	greeting, err := client.exchange(ctx, nil, readReply)
	if err == nil {
		err = greeting.Err()
	}
	if err != nil {
		return nil, err
	}
	// "0001 BIRD 2.0.12 ready."
	if words := strings.Fields(greeting[len(greeting)-1].Text); len(words) >= 2 && words[0] == "BIRD" {
		client.Version = words[1]
	}
	return client, nil
}

// Close ends the connection.
func (client *Client) Close() error { return client.conn.Close() }

// Command sends one command and returns BIRD's reply; ctx and commandTimeout bound it. An error
// with a reply is BIRD's refusal; an error without a reply is a failure of the connection.
func (client *Client) Command(ctx context.Context, command string) (Reply, error) {
	return client.run(ctx, command, readReply)
}

// Scan is Command for a long reply: it passes each line to a function and keeps none.
func (client *Client) Scan(ctx context.Context, command string, each func(text string)) error {
	_, err := client.run(ctx, command, func(r *bufio.Reader) (Reply, error) {
		var last replyLine
		err := scanReply(r, maxScannedLines, func(line replyLine) error {
			last = line
			each(line.Text)
			return nil
		})
		return Reply{last}, err
	})
	return err
}

type readFunc func(*bufio.Reader) (Reply, error)

func (client *Client) run(ctx context.Context, command string, read readFunc) (Reply, error) {
	if len(command) > maxCommand || strings.ContainsAny(command, "\x00\r\n") {
		return nil, fmt.Errorf("failed to send command of %d bytes: BIRD takes one line of at most %d bytes",
			len(command), maxCommand)
	}
	reply, err := client.exchange(ctx, []byte(command+"\n"), read)
	if err != nil {
		return nil, fmt.Errorf("failed to run BIRD command %q: %w", command, err)
	}
	if err := reply.Err(); err != nil {
		return reply, fmt.Errorf("BIRD command %q failed: %w", command, err)
	}
	return reply, nil
}

// exchange writes a request, if any, and reads one reply. ctx and commandTimeout interrupt both.
func (client *Client) exchange(ctx context.Context, request []byte, read readFunc) (Reply, error) {
	ctx, cancel := task.WithAwakeTimeout(ctx, commandTimeout)
	defer cancel()
	if err := client.conn.SetDeadline(time.Time{}); err != nil {
		return nil, err
	}
	interrupted := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(interrupted)
		_ = client.conn.SetDeadline(time.Unix(1, 0)) // fails only on a closed connection
	})
	defer func() {
		// A late interrupt must not hit the next exchange.
		if !stop() {
			<-interrupted
		}
	}()
	// BIRD sends its greeting without a request.
	if len(request) > 0 {
		if _, err := client.conn.Write(request); err != nil {
			return nil, err
		}
	}
	return read(client.reader)
}
