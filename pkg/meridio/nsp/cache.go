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
	o      *Options
	failed func() // counts a failure
	calls  files.Calls
	wanted latest.Value[*accepted] // nil before the first accepted list since the start
}

// accepted is a list to write, and the time of its acceptance.
type accepted struct {
	list *nspv1.Attractor
	at   time.Time
}

// cached is the content of the file.
type cached struct {
	Trench    string          `json:"trench"`
	Attractor string          `json:"attractor"`
	Received  time.Time       `json:"received"`
	List      json.RawMessage `json:"list"`
}

func newCache(o *Options, failed func()) *cache { return &cache{o: o, failed: failed} }

// read returns the list in the file and the time when it was received, or nil without a usable
// file.
func (c *cache) read() (list *nspv1.Attractor, received time.Time) {
	type content struct {
		cached
		found bool
	}
	x, err := files.Do(context.Background(), &c.calls, "cache "+c.o.Cache, func() (x content, err error) {
		_, x.found, err = durable.Read(c.o.Cache, &x.cached)
		return x, err
	})
	if err == nil && x.found {
		list = &nspv1.Attractor{}
		if err = (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(x.List, list); err != nil {
			err = fmt.Errorf("%s %w: %w", c.o.Cache, durable.ErrCorrupt, err)
		}
	}
	switch {
	case errors.Is(err, durable.ErrCorrupt):
		c.failed()
		durable.SetAside(c.o.Cache, err, time.Now(), c.o.Log)
		return nil, time.Time{}
	case err != nil:
		c.failed()
		c.o.Log.Error("failed to read the cache, starting without it", "error", err)
		return nil, time.Time{}
	case !x.found:
		return nil, time.Time{}
	case x.Trench != c.o.Trench || x.Attractor != c.o.Attractor:
		c.o.Log.Info("cache ignored: it is of another attractor", "file", c.o.Cache,
			"trench", x.Trench, "attractor", x.Attractor)
		return nil, time.Time{}
	}
	return list, x.Received
}

// write passes the list to run, which writes it. It does not block.
func (c *cache) write(list *nspv1.Attractor) { c.wanted.Set(&accepted{list, time.Now().UTC()}) }

// save writes a list to the file.
func (c *cache) save(ctx context.Context, a *accepted) error {
	list, err := protojson.Marshal(a.list)
	if err != nil {
		return fmt.Errorf("failed to encode the cache: %w", err)
	}
	_, err = files.Do(ctx, &c.calls, "cache "+c.o.Cache, func() (struct{}, error) {
		return struct{}{}, durable.Write(c.o.Cache,
			&cached{Trench: c.o.Trench, Attractor: c.o.Attractor, Received: a.at, List: list})
	})
	return err
}

// run writes the newest list until ctx ends, and retries failed writes.
func (c *cache) run(ctx context.Context) {
	retry := backoff.Backoff{Min: minCacheBackoff, Max: maxCacheBackoff, Jitter: 0.2}
	timer := time.NewTimer(0)
	defer timer.Stop()
	var written *accepted
	failure := ""
	for {
		wanted, changed := c.wanted.Get()
		timer.Stop()
		if wanted != written {
			err := c.save(ctx, wanted)
			switch {
			case ctx.Err() != nil:
				return
			case err == nil:
				if failure != "" {
					c.o.Log.Info("cache written again", "file", c.o.Cache)
				}
				written, failure = wanted, ""
				retry.Reset()
			default:
				c.failed()
				if err.Error() != failure {
					c.o.Log.Error("failed to write the cache, retrying; a start without the NSP would use an older list",
						"error", err)
				}
				failure = err.Error()
				timer.Reset(retry.Next())
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-timer.C:
		}
	}
}
