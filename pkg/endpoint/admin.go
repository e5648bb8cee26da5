package endpoint

import (
	"context"
	"log/slog"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/logs"
)

// statusInterval is the least time between two messages of WatchStatus.
const statusInterval = 100 * time.Millisecond

// WatchStatus calls send now and after every change until the call with ctx ends.
func WatchStatus[T any](ctx context.Context, changes *latest.Value[T], send func() error) error {
	for {
		_, changed := changes.Get()
		if err := send(); err != nil {
			return err
		}
		if err := backoff.Sleep(ctx, statusInterval); err != nil {
			return status.FromContextError(err).Err()
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return status.FromContextError(ctx.Err()).Err()
		}
	}
}

// Timestamp converts a time; zero is nil.
func Timestamp(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}

// SetLogLevel changes the level of the process and returns the previous one.
func SetLogLevel(level *logs.Level, log *slog.Logger, name string) (previous string, err error) {
	previous = level.String()
	if err := level.Set(name); err != nil {
		return "", status.Error(codes.InvalidArgument, err.Error())
	}
	log.Info("log level changed", "from", previous, "to", name)
	return previous, nil
}
