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
func (j *Journal) ListEvents(_ context.Context, request *adminv1.ListEventsRequest) (*adminv1.ListEventsResponse,
	error,
) {
	v, err := parse(request.GetVip())
	if err != nil {
		return nil, err
	}
	if err := j.checkKnown(v); err != nil {
		return nil, err
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	found, _, _ := j.events.page(j.events.tail(request.GetAfter(), int(request.GetLimit()), v), maxEvents, v)
	return &adminv1.ListEventsResponse{InstanceId: j.Instance, Events: found}, nil
}

// WatchEvents implements the EventService. A slow client receives the number of events that it
// missed.
func (j *Journal) WatchEvents(request *adminv1.WatchEventsRequest,
	stream grpc.ServerStreamingServer[adminv1.WatchEventsResponse],
) error {
	v, err := parse(request.GetVip())
	if err != nil {
		return err
	}
	if request.GetInstanceId() == "" { // otherwise the client continues, perhaps with another process
		if err := j.checkKnown(v); err != nil {
			return err
		}
	}
	j.mu.Lock()
	after := j.events.oldest() - 1
	if request.GetInstanceId() == j.Instance {
		// A client may send a number that was never assigned, but must not wait until it is reached.
		after = min(request.GetAfter(), j.events.last)
	}
	after = j.events.tail(after, int(request.GetLimit()), v)
	j.mu.Unlock()
	for first := true; ; first = false {
		// Get the channel before the read: an event that is added after the read closes it.
		_, changed := j.changed.Get()
		j.mu.Lock()
		found, upTo, lost := j.events.page(after, maxEventsPerMessage, v)
		more := upTo < j.events.last
		j.mu.Unlock()
		after = upTo
		// The first message confirms the watch and names the instance, even without an event.
		if first || len(found) > 0 || lost > 0 {
			if err := stream.Send(&adminv1.WatchEventsResponse{
				InstanceId: j.Instance, Events: found, Lost: lost, UpTo: upTo,
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
func (j *Journal) checkKnown(v vip.VIP) error {
	if v.IsZero() || j.Known(v) {
		return nil
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if found, _, _ := j.events.page(0, 1, v); len(found) > 0 {
		return nil
	}
	return status.Errorf(codes.NotFound, "VIP %s is not configured and has no events; `status` lists the VIPs", v)
}

// parse parses the VIP of a request. The zero VIP selects all VIPs.
func parse(name string) (vip.VIP, error) {
	if name == "" {
		return vip.VIP{}, nil
	}
	v, err := vip.Parse(name)
	if err != nil {
		return v, status.Error(codes.InvalidArgument, err.Error())
	}
	return v, nil
}
