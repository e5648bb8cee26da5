package file

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/vipgate/vipgate/pkg/files"
	"github.com/vipgate/vipgate/pkg/trench"
)

const (
	maxStaleFile = 4 << 10 // bytes
	maxCause     = 300     // bytes of a cause
)

// parseStale parses the content of a stale file.
func parseStale(data []byte) (*trench.Stale, error) {
	at, cause, _ := strings.Cut(strings.TrimSuffix(string(data), "\n"), " ")
	since, err := time.Parse(time.RFC3339, at)
	if err != nil || strings.TrimSpace(cause) == "" {
		return nil, fmt.Errorf("%s is not a time such as 2006-01-02T15:04:05Z, a space and a cause", trench.Quote(string(data)))
	}
	return &trench.Stale{Since: since, Cause: quoteControls(cause)}, nil
}

// quoteControls returns text from another process on one line, truncated, with unprintable
// characters escaped as in a Go string.
func quoteControls(s string) string {
	var b strings.Builder
	for len(s) > 0 && b.Len() < maxCause {
		r, n := utf8.DecodeRuneInString(s)
		if strconv.IsPrint(r) && (r != utf8.RuneError || n > 1) {
			b.WriteString(s[:n])
		} else {
			q := strconv.Quote(s[:n])
			b.WriteString(q[1 : len(q)-1])
		}
		s = s[n:]
	}
	if s != "" {
		b.WriteString("…")
	}
	return b.String()
}

// readStale publishes the content of the stale file. Its calls are separate from the calls for
// the trench file, so that a hang of one file delays the other only briefly.
func (w *Watcher) readStale(ctx context.Context) {
	path := w.path + trench.StaleSuffix
	data, err := files.Do(ctx, &w.staleCalls, path, func() ([]byte, error) { return files.Read(path, maxStaleFile) })
	if ctx.Err() != nil {
		return
	}
	var is *trench.Stale
	if err == nil {
		is, err = parseStale(data)
	}
	was := w.stale.Load()
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		is = &trench.Stale{Since: time.Now(), Err: fmt.Errorf("failed to read stale file %s: %w", path, err)}
		if was != nil {
			is.Since = was.Since
		}
	}
	// At the zero time the text has no age: it differs only for another cause or time.
	if was.Problem(time.Time{}) != is.Problem(time.Time{}) {
		w.stale.Set(is)
	}
}
