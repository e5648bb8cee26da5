package nsp

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	nspv1 "github.com/vipgate/vipgate/pkg/api/nsp/v1"
	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/durable"
	"github.com/vipgate/vipgate/pkg/files"
	"github.com/vipgate/vipgate/pkg/latest"
)

// Back-off of cache writes. It is long, because a full disk does not recover within milliseconds.
const (
	minCacheBackoff = time.Second
	maxCacheBackoff = time.Minute
)

// cache stores the last accepted list in a file, for a start without the NSP.
type cache struct {
	options *Options
	failed  func() // counts a failure
	calls   files.Calls
	wanted  latest.Value[*cached] // nil before the first accepted list since the start
}

type cached struct {
	Trench    string          `json:"trench"`
	Attractor string          `json:"attractor"`
	Received  time.Time       `json:"received"`
	List      json.RawMessage `json:"list"`
}

// read returns the list in the file and when it was received, or nil without a usable file.
func (c *cache) read() (list *nspv1.Attractor, received time.Time) {
	type content struct {
		cached
		found bool
	}
	path, log := c.options.Cache, c.options.Log
	file, err := files.Do(context.Background(), &c.calls, "cache "+path, func() (file content, err error) {
		_, file.found, err = durable.Read(path, &file.cached)
		return file, err
	})
	if err == nil && file.found {
		list = &nspv1.Attractor{}
		if err = (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(file.List, list); err != nil {
			err = fmt.Errorf("%s %w: %w", path, durable.ErrCorrupt, err)
		}
	}
	switch {
	case errors.Is(err, durable.ErrCorrupt):
		c.failed()
		durable.SetAside(path, err, time.Now(), log)
	case err != nil:
		c.failed()
		log.Error("failed to read the cache, starting without it", "error", err)
	case !file.found:
	case file.Trench != c.options.Trench || file.Attractor != c.options.Attractor:
		log.Info("cache ignored: it is of another attractor", "file", path,
			"trench", file.Trench, "attractor", file.Attractor)
	default:
		return list, file.Received
	}
	return nil, time.Time{}
}

// write passes the list to run, which writes it. It does not block.
func (c *cache) write(list *nspv1.Attractor) {
	content, err := protojson.Marshal(list)
	if err != nil { // a received message can be encoded
		c.failed()
		return
	}
	c.wanted.Set(&cached{c.options.Trench, c.options.Attractor, time.Now().UTC(), content})
}

// run writes the newest list until ctx ends, and retries failed writes.
func (c *cache) run(ctx context.Context) {
	retry := backoff.Backoff{Min: minCacheBackoff, Max: maxCacheBackoff, Jitter: 0.2}
	var timer <-chan time.Time // nil without a failure
	var written *cached
	failure := ""
	path, log := c.options.Cache, c.options.Log
	for {
		// A list that arrives during the write closes changed, which ends the wait below.
		wanted, changed := c.wanted.Get()
		timer = nil
		if wanted != written {
			// The file system may hang; files.Do bounds the wait and has one call at a time.
			_, err := files.Do(ctx, &c.calls, "cache "+path, func() (struct{}, error) {
				return struct{}{}, durable.Write(path, wanted)
			})
			switch {
			case ctx.Err() != nil:
				return
			case err == nil:
				if failure != "" {
					log.Info("cache written again", "file", path)
				}
				written, failure = wanted, ""
				retry.Reset()
			default:
				c.failed()
				// Log an error once, not with every retry.
				if err.Error() != failure {
					log.Error("failed to write the cache, retrying; a start without the NSP would use an older list",
						"error", err)
				}
				failure = err.Error()
				timer = time.After(retry.Next())
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-timer:
		}
	}
}
