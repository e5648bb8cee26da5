package secret

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/vipgate/vipgate/pkg/backoff"
)

// source watches one Secret and owns the files of its keys.
type source struct {
	*Watcher
	name string
	keys []string
}

func (s *source) run(ctx context.Context) error {
	delay := backoff.Backoff{Min: s.minBackoff, Max: s.maxBackoff, Jitter: 0.2}
	for {
		began := time.Now()
		err := s.watch(ctx)
		if ctx.Err() != nil {
			return nil
		}
		// Reset by duration, not at the first event: a server may end each watch after that event.
		if time.Since(began) > s.maxBackoff {
			delay.Reset()
		}
		if err != nil {
			s.failed(s.name, fmt.Errorf("failed to watch Secret %s/%s: %w", s.namespace, s.name, err))
		}
		if err := delay.Wait(ctx); err != nil {
			return nil
		}
	}
}

// watch applies the events of one watch until the API server or ctx ends it. Each watch starts
// with the current state and uses no resource version, which could be expired.
func (s *source) watch(ctx context.Context) error {
	// Randomize the timeout, so that the frontends of a trench do not reconnect simultaneously. It
	// is long enough that the reconnects cause no load.
	timeout := s.timeout + rand.N(s.timeout)
	ctx, cancel := context.WithTimeout(ctx, timeout+s.slack)
	defer cancel()
	initialEvents := true
	body, err := s.client.watch(ctx, s.namespace, s.name, timeout, initialEvents)
	// An API server without streamed lists refuses the parameter.
	if rejected := (*rejection)(nil); errors.As(err, &rejected) && rejected.code == http.StatusUnprocessableEntity {
		initialEvents = false
		body, err = s.client.watch(ctx, s.namespace, s.name, timeout, initialEvents)
	}
	if err != nil {
		return err
	}
	// Read in a goroutine: a read blocks until the next event, for which the deadlines must not wait.
	events := make(chan result)
	var reader sync.WaitGroup
	reader.Go(func() { read(ctx, body, events) })
	defer reader.Wait()
	defer body.Close()
	defer cancel()

	// An API server without initial events sends no event for a missing Secret: see quietTime.
	var quiet <-chan time.Time
	if !initialEvents {
		quiet = time.After(s.quiet)
	}
	for known := false; ; {
		select {
		case received := <-events:
			switch {
			case errors.Is(received.err, io.EOF) && known:
				return nil
			case errors.Is(received.err, io.EOF):
				return errors.New("the API server ends the watch before the current state")
			case received.err != nil:
				return received.err
			}
			decided, err := s.apply(received.event, known)
			if err != nil {
				return err
			}
			known = known || decided
		case <-quiet:
			if !known {
				if err := s.absent(); err != nil {
					return err
				}
			}
			quiet, known = nil, true
		case <-ctx.Done():
			return errors.New("the API server did not end the watch in time")
		}
	}
}

// result is an event, or the error that ended a stream.
type result struct {
	event event
	err   error
}

// read sends the events of a stream, and the error at its end, until ctx ends.
func read(ctx context.Context, body io.Reader, to chan<- result) {
	stream := newStream(body)
	for {
		next, err := stream.next()
		select {
		case to <- result{next, err}:
		case <-ctx.Done():
			return
		}
		if err != nil {
			return
		}
	}
}

// apply applies an event. known reports whether the state of the Secret was known before the
// event, and decided whether the event determines it.
func (s *source) apply(e event, known bool) (decided bool, err error) {
	switch e.Type {
	case typeError:
		return false, e.failure()
	case typeAdded, typeModified, typeDeleted, typeBookmark:
	default:
		return false, fmt.Errorf("the API server sends an event of the unknown type %s", quote(e.Type))
	}
	secret, err := e.object()
	switch {
	case err != nil:
		return false, err
	case e.Type == typeBookmark && (known || secret.Metadata.Annotations[initialEventsEnd] != "true"):
		return false, nil
	case e.Type == typeBookmark: // the current state ends without the Secret
		return true, s.absent()
	case secret.Kind != "Secret" || secret.Metadata.Name != s.name:
		return false, fmt.Errorf("the API server sends the %s %s instead", quote(secret.Kind), quote(secret.Metadata.Name))
	case e.Type == typeDeleted:
		return true, s.absent()
	}
	return true, s.present(secret.Data)
}

func (s *source) present(data map[string][]byte) error {
	var missing []string
	for _, key := range s.keys {
		value, exists := data[key]
		path := s.File(s.name, key)
		if !exists {
			missing = append(missing, key)
			if err := s.remove(key); err != nil {
				return err
			}
			continue
		}
		changed, err := store(path, value)
		if err != nil {
			return err
		}
		if changed {
			s.log.Info("key of Secret written", "secret", s.name, "key", key, "file", path)
		}
	}
	problem := ""
	if len(missing) > 0 {
		problem = fmt.Sprintf("Secret %s/%s has no key %s", s.namespace, s.name, strings.Join(missing, ", "))
	}
	s.succeeded(s.name, problem)
	return nil
}

// absent removes the files of a Secret that does not exist.
func (s *source) absent() error {
	for _, key := range s.keys {
		if err := s.remove(key); err != nil {
			return err
		}
	}
	s.succeeded(s.name, fmt.Sprintf("Secret %s/%s does not exist", s.namespace, s.name))
	return nil
}

func (s *source) remove(key string) error {
	path := s.File(s.name, key)
	existed, err := remove(path)
	if existed {
		s.log.Warn("key of Secret removed", "secret", s.name, "key", key, "file", path)
	}
	return err
}
