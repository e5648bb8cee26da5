package identity_test

import (
	"bytes"
	"context"
	"encoding/json"
	"log/slog"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// waitLimit bounds every wait for a condition.
const waitLimit = 20 * time.Second

// journal collects log records.
type journal struct {
	mu      sync.Mutex
	buf     bytes.Buffer
	changed chan struct{}
}

func newJournal() (*journal, *slog.Logger) {
	j := &journal{changed: make(chan struct{})}
	return j, slog.New(slog.NewJSONHandler(j, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

func (j *journal) Write(b []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	close(j.changed)
	j.changed = make(chan struct{})
	return j.buf.Write(b)
}

func (j *journal) records(tb testing.TB) ([]map[string]any, <-chan struct{}) {
	j.mu.Lock()
	defer j.mu.Unlock()
	var records []map[string]any
	for dec := json.NewDecoder(bytes.NewReader(j.buf.Bytes())); dec.More(); {
		var r map[string]any
		must(tb, dec.Decode(&r))
		records = append(records, r)
	}
	return records, j.changed
}

// wait waits for a record with these attributes and returns it.
func (j *journal) wait(tb testing.TB, want map[string]any) map[string]any {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), waitLimit)
	defer cancel()
	for {
		records, changed := j.records(tb)
		for _, r := range records {
			if matches(r, want) {
				return r
			}
		}
		select {
		case <-changed:
		case <-ctx.Done():
			tb.Fatalf("no log record with %v among %v", want, records)
		}
	}
}

func (j *journal) count(tb testing.TB, want map[string]any) int {
	records, _ := j.records(tb)
	n := 0
	for _, r := range records {
		if matches(r, want) {
			n++
		}
	}
	return n
}

func matches(r, want map[string]any) bool {
	for k, v := range want {
		if r[k] != v {
			return false
		}
	}
	return true
}
