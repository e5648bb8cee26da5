package journal

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	"github.com/vipgate/vipgate/pkg/vip"
)

// maxEventsPerMessage bounds a message of WatchEvents.
const maxEventsPerMessage = 256

// ListEvents implements the EventService.
func (journal *Journal) ListEvents(_ context.Context, request *adminv1.ListEventsRequest) (*adminv1.ListEventsResponse,
	error,
) {
	prefix, err := parse(request.GetVip())
	if err != nil {
		return nil, err
	}
	if err := journal.checkKnown(prefix); err != nil {
		return nil, err
	}
	journal.mu.Lock()
	defer journal.mu.Unlock()
	after := journal.events.tail(request.GetAfter(), int(request.GetLimit()), prefix)
	found, _, _ := journal.events.page(after, maxEvents, prefix)
	return &adminv1.ListEventsResponse{InstanceId: journal.Instance, Events: found}, nil
}

// WatchEvents implements the EventService. A slow client receives the number of missed events.
func (journal *Journal) WatchEvents(request *adminv1.WatchEventsRequest,
	stream grpc.ServerStreamingServer[adminv1.WatchEventsResponse],
) error {
	prefix, err := parse(request.GetVip())
	if err != nil {
		return err
	}
	if request.GetInstanceId() == "" { // otherwise the client continues, perhaps with another process
		if err := journal.checkKnown(prefix); err != nil {
			return err
		}
	}
	journal.mu.Lock()
	after := journal.events.oldest() - 1
	if request.GetInstanceId() == journal.Instance {
		// A client may send a number that was never assigned, but must not wait until it is reached.
		after = min(request.GetAfter(), journal.events.last)
	}
	after = journal.events.tail(after, int(request.GetLimit()), prefix)
	journal.mu.Unlock()
	for first := true; ; first = false {
		// Get the channel before the read: an event that is added after the read closes it.
		_, changed := journal.changed.Get()
		journal.mu.Lock()
		found, upTo, lost := journal.events.page(after, maxEventsPerMessage, prefix)
		more := upTo < journal.events.last
		journal.mu.Unlock()
		after = upTo
		// The first message confirms the watch and names the instance, even without an event.
		if first || len(found) > 0 || lost > 0 {
			if err := stream.Send(&adminv1.WatchEventsResponse{
				InstanceId: journal.Instance, Events: found, Lost: lost, UpTo: upTo,
			}); err != nil {
				return err
			}
		}
		if more {
			continue
		}
		select {
		case <-changed:
		case <-stream.Context().Done():
			return status.FromContextError(stream.Context().Err()).Err()
		}
	}
}

// checkKnown returns an error for a VIP that is neither known nor has events.
func (journal *Journal) checkKnown(prefix vip.VIP) error {
	if prefix.IsZero() || journal.Known(prefix) {
		return nil
	}
	journal.mu.Lock()
	defer journal.mu.Unlock()
	if found, _, _ := journal.events.page(0, 1, prefix); len(found) > 0 {
		return nil
	}
	return status.Errorf(codes.NotFound, "VIP %s is not configured and has no events; `status` lists the VIPs", prefix)
}

// parse parses the VIP of a request. The zero VIP selects all VIPs.
func parse(name string) (vip.VIP, error) {
	if name == "" {
		return vip.VIP{}, nil
	}
	prefix, err := vip.Parse(name)
	if err != nil {
		return prefix, status.Error(codes.InvalidArgument, err.Error())
	}
	return prefix, nil
}
