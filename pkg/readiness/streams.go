package readiness

import (
	"context"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
)

// OpenStream authorizes a reader of another service on the same socket, and counts its stream until
// done is called. The handler must return after stopping is closed, which EndWatches does.
func (s *Server) OpenStream(ctx context.Context, method string) (
	id spiffeid.ID, done func(), stopping <-chan struct{}, err error,
) {
	id, done, err = s.openStream(ctx, method, RoleReader)
	return id, done, s.stop, err
}
