package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	"github.com/vipgate/vipgate/pkg/status"
	"github.com/vipgate/vipgate/test/harness"
)

var errGone = grpcstatus.Error(codes.Unavailable, "the other end is gone")

// session is one connection with its messages and its final error.
type session struct {
	messages []*adminv1.WatchEventsResponse
	end      error
}

// script plays sessions in sequence. The last session ends the test's context.
type script struct {
	sessions []session
	asked    []string
	at       []time.Duration
	begin    time.Time
	cancel   context.CancelFunc
}

func (s *script) open(ctx context.Context, request *adminv1.WatchEventsRequest,
	take func(*adminv1.WatchEventsResponse) error,
) error {
	if request.GetVip() != "20.0.0.1/32" {
		return fmt.Errorf("asked for events of %q", request.GetVip())
	}
	s.asked = append(s.asked, fmt.Sprintf("%s/%d/%d", request.GetInstanceId(), request.GetAfter(), request.GetLimit()))
	s.at = append(s.at, time.Since(s.begin))
	if len(s.sessions) == 0 {
		s.cancel()
		return ctx.Err()
	}
	now := s.sessions[0]
	s.sessions = s.sessions[1:]
	for _, m := range now.messages {
		if err := take(m); err != nil {
			return err
		}
	}
	return now.end
}

// follow plays the sessions and returns the printed events and the notes.
func follow(t *testing.T, s *script, limit uint32) (printed, notes string, err error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	s.cancel, s.begin = cancel, time.Now()
	var out, noted bytes.Buffer
	f := &EventFollower{
		Program: "frontend", Open: s.open, Notes: &noted,
		Request: &adminv1.WatchEventsRequest{Vip: "20.0.0.1/32", Limit: limit},
		Print: func(events []*adminv1.Event) error {
			for _, e := range events {
				fmt.Fprintf(&out, "%d ", e.GetSequence())
			}
			return nil
		},
	}
	err = f.Run(ctx)
	return out.String(), noted.String(), err
}

func message(instance string, lost uint64, numbers ...uint64) *adminv1.WatchEventsResponse {
	m := &adminv1.WatchEventsResponse{InstanceId: instance, Lost: lost}
	for _, n := range numbers {
		m.Events, m.UpTo = append(m.Events, &adminv1.Event{Sequence: n}), n
	}
	return m
}

func TestFollowResumesAfterADisconnect(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &script{sessions: []session{
			{[]*adminv1.WatchEventsResponse{message("a", 0, 8, 9), message("a", 0, 10)}, errGone},
			{[]*adminv1.WatchEventsResponse{message("a", 3, 14)}, errGone},
		}}
		printed, notes, err := follow(t, s, 5)
		if err != nil || printed != "8 9 10 14 " {
			t.Errorf("printed %q, %v", printed, err)
		}
		if got, want := strings.Join(s.asked, " "), "/0/5 a/10/0 a/14/0"; got != want {
			t.Errorf("asked for %s, want %s", got, want)
		}
		harness.WantText(t, notes, "the frontend is gone, waiting for it: ", "connected again", "3 events lost")
	})
}

func TestFollowReportsARestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &script{sessions: []session{
			{[]*adminv1.WatchEventsResponse{message("a", 0, 1, 2)}, errGone},
			{nil, errors.New("/run/vipgate/frontend.sock does not exist")},
			{nil, errGone},
			{[]*adminv1.WatchEventsResponse{message("b", 0, 1), message("b", 0, 2)}, errGone},
		}}
		printed, notes, err := follow(t, s, 0)
		if err != nil || printed != "1 2 1 2 " {
			t.Errorf("printed %q, %v", printed, err)
		}
		if got, want := strings.Join(s.asked, " "), "/0/0 a/2/0 a/2/0 a/2/0 b/2/0"; got != want {
			t.Errorf("asked for %s, want %s", got, want)
		}
		if strings.Count(notes, "restarted") != 1 || strings.Count(notes, "waiting for it") != 2 ||
			strings.Count(notes, "connected again") != 1 {
			t.Errorf("noted\n%s", notes)
		}
		// Retries after 100, 200 and 400 ms during the outage, and after 100 ms once it was reachable.
		if got, want := fmt.Sprint(s.at), "[0s 100ms 300ms 700ms 800ms]"; got != want {
			t.Errorf("attempts at %s, want %s", got, want)
		}
	})
}

func TestFollowWaitsAtMostTwoSeconds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &script{sessions: []session{{[]*adminv1.WatchEventsResponse{message("a", 0)}, errGone}}}
		for range 20 {
			s.sessions = append(s.sessions, session{nil, errGone})
		}
		if _, _, err := follow(t, s, 0); err != nil {
			t.Fatal(err)
		}
		if n := len(s.at); s.at[n-1]-s.at[n-2] != 2*time.Second {
			t.Errorf("attempts at %v", s.at)
		}
	})
}

func TestFollowGivesUpWhereNoAttemptHelps(t *testing.T) {
	for _, tt := range []struct {
		name     string
		sessions []session
		want     string
	}{
		{"the first connection fails", []session{{nil, errGone}}, "the process does not answer on its admin socket"},
		{
			"there is no socket",
			[]session{{nil, errors.New("no socket: is `frontend run` running here?")}},
			"is `frontend run` running here?",
		},
		{"the VIP is none", []session{{nil, grpcstatus.Error(codes.InvalidArgument, "no VIP")}}, "no VIP"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				if _, _, err := follow(t, &script{sessions: tt.sessions}, 0); err == nil ||
					!strings.Contains(err.Error(), tt.want) {
					t.Errorf("got %v, want %q", err, tt.want)
				}
			})
		})
	}
}

func TestFollowEndsWhenItCannotPrint(t *testing.T) {
	broken := errors.New("no JSON")
	s := &script{sessions: []session{{[]*adminv1.WatchEventsResponse{message("a", 0, 1)}, errGone}}}
	f := &EventFollower{
		Program: "frontend", Open: s.open, Notes: &bytes.Buffer{},
		Request: &adminv1.WatchEventsRequest{Vip: "20.0.0.1/32"},
		Print:   func([]*adminv1.Event) error { return broken },
	}
	if err := f.Run(t.Context()); !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}
}

func TestPrinterWritesOneObjectInEachLine(t *testing.T) {
	var b bytes.Buffer
	show := EventPrinter(&Output{Writer: &b}, "json", status.FrontendEventLog())
	for range 2 {
		harness.Must(t, show(message("a", 0, 1, 2).GetEvents()))
	}
	lines := strings.Split(strings.TrimSpace(b.String()), "\n")
	if len(lines) != 4 || !strings.HasPrefix(lines[1], `{"`) || !strings.Contains(lines[1], `"sequence":"2"`) {
		t.Errorf("got\n%s", b.String())
	}
}

func TestEventsOverARealSocketNameTheRemedy(t *testing.T) {
	path := filepath.Join(t.TempDir(), "admin.sock")
	for _, follow := range []bool{true, false} {
		flags := EventFlags{Follow: follow, AdminFlags: AdminFlags{AdminSocket: "unix://" + path}}
		out := &Output{Writer: &bytes.Buffer{}}
		err := ShowEvents(t.Context(), out, flags, "frontend", "", status.FrontendEventLog())
		harness.WantError(t, err, "is `frontend run` running here")
	}
}

// A command that follows ends with the reader of its standard output, also without another event.
func TestFollowingEndsWithReader(t *testing.T) {
	reader, writer, err := os.Pipe()
	harness.Must(t, err)
	stdout := os.Stdout
	defer func() { os.Stdout = stdout }()
	os.Stdout = writer
	defer writer.Close()
	ctx, cancel := Following(t.Context())
	defer cancel()
	if ctx.Err() != nil {
		t.Error("ended while the pipe has a reader")
	}
	harness.Must(t, reader.Close())
	select {
	case <-ctx.Done():
	case <-time.After(30 * time.Second):
		t.Error("continues without a reader")
	}
}
