package main

import (
	"context"
	"fmt"
	"testing"

	"google.golang.org/grpc"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	lbv1 "github.com/vipgate/vipgate/pkg/api/lb/v1"
)

// eventServer is an lb that keeps some events.
type eventServer struct {
	lbv1.LBServiceClient
	instance    string
	first, last uint64
}

func (s *eventServer) ListEvents(_ context.Context, r *lbv1.ListEventsRequest,
	_ ...grpc.CallOption,
) (*lbv1.ListEventsResponse, error) {
	answer := &lbv1.ListEventsResponse{InstanceId: s.instance}
	for n := max(s.first, r.GetAfter()+1); n <= s.last; n++ {
		answer.Events = append(answer.Events, &lbv1.Event{Sequence: n})
	}
	return answer, nil
}

func TestNewEventsAreEachShownOnce(t *testing.T) {
	for _, tt := range []struct {
		name   string
		from   cli.EventPosition
		server eventServer
		want   string
	}{
		{"the first look", cli.EventPosition{}, eventServer{instance: "a", first: 3, last: 5}, "a: 3-5 up to 5, 0 lost"},
		{
			"nothing new",
			cli.EventPosition{Instance: "a", After: 5},
			eventServer{instance: "a", first: 1, last: 5},
			"a: 0-0 up to 5, 0 lost",
		},
		{
			"some new",
			cli.EventPosition{Instance: "a", After: 5},
			eventServer{instance: "a", first: 1, last: 7},
			"a: 6-7 up to 7, 0 lost",
		},
		{
			"some no longer kept",
			cli.EventPosition{Instance: "a", After: 5},
			eventServer{instance: "a", first: 9, last: 10},
			"a: 9-10 up to 10, 3 lost",
		},
		{
			"a restart",
			cli.EventPosition{Instance: "a", After: 5},
			eventServer{instance: "b", first: 1, last: 9},
			"b: 1-9 up to 9, 0 lost",
		},
		{
			"a restart without events",
			cli.EventPosition{Instance: "a", After: 5},
			eventServer{instance: "b", first: 1},
			"b: 0-0 up to 0, 0 lost",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p, err := newEvents(t.Context(), &tt.server, tt.from)
			var first, last uint64
			if n := len(p.Events); n > 0 {
				first, last = p.Events[0].GetSequence(), p.Events[n-1].GetSequence()
			}
			if got := fmt.Sprintf("%s: %d-%d up to %d, %d lost", p.Instance, first, last, p.UpTo, p.Lost); err != nil ||
				got != tt.want {
				t.Errorf("got %s, %v; want %s", got, err, tt.want)
			}
		})
	}
}
