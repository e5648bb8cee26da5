package record

import (
	"encoding/binary"
	"fmt"
	"slices"
)

// collector makes records of what a file holds.
type collector struct {
	Records
	index
	kinds []string // of the buckets
	told  *summary
}

func newCollector() *collector {
	return &collector{
		Records: Records{Targets: make(map[uint32]Target), Streams: make(map[string]Stream)},
		index:   newIndex(),
	}
}

// begin is told that there is a bucket, before what it holds.
func (c *collector) begin(kind []byte) error {
	if !slices.Contains(kinds, string(kind)) {
		return fmt.Errorf("there is a bucket %q: a newer program wrote it", kind)
	}
	c.kinds = append(c.kinds, string(kind))
	return nil
}

// add is told of a record.
func (c *collector) add(kind, key, value []byte) error {
	var err error
	switch string(kind) {
	case targetKind:
		var t Target
		if t, err = decodeTarget(key, value); err == nil {
			err = c.index.addTarget(t, checksumOf(value))
			c.Targets[t.Number] = t
		}
	case streamKind:
		var s Stream
		if s, err = decodeStream(key, value); err == nil {
			c.index.addStream(s.Name, checksumOf(value))
			c.Streams[s.Name] = s
		}
	case summaryKind:
		c.told = new(summary)
		*c.told, err = decodeSummary(key, value)
	}
	if err != nil {
		name := fmt.Sprintf("%q", key[:min(len(key), maxName)])
		if string(kind) == targetKind && len(key) == 4 {
			name = fmt.Sprint(binary.BigEndian.Uint32(key))
		}
		return fmt.Errorf("%s: record %s: %w", kind, name, err)
	}
	return nil
}

// end compares what was found with the summary, and that with the transaction of the
// file: a page that was not written although later ones were is whole in itself.
func (c *collector) end(transaction uint64) (Records, error) {
	if len(c.kinds) != len(kinds) || c.told == nil {
		return Records{}, fmt.Errorf("it has only the buckets %v, or no summary", c.kinds)
	}
	want := c.index.summary
	want.transaction = c.told.transaction
	switch {
	case *c.told != want:
		return Records{}, fmt.Errorf("it has %d targets and %d streams, its summary says %d and %d, or their checksums differ",
			want.targets, want.streams, c.told.targets, c.told.streams)
	case c.told.transaction != transaction:
		return Records{}, fmt.Errorf("its summary is of transaction %d, the file of %d", c.told.transaction, transaction)
	}
	return c.Records, nil
}
