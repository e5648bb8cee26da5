package trench

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
)

// StaleSuffix is the suffix of the stale file. The writer of a trench file keeps it next to the
// trench file while it cannot refresh that: one line with an RFC 3339 time, a space and the
// cause.
const StaleSuffix = ".stale"

const (
	maxStaleFile = 4 << 10 // bytes
	maxCause     = 300     // bytes of a cause
)

// Stale is the reason why the trench file may be older than its source. It is nil if the file is
// current, or if its writer keeps no stale file.
type Stale struct {
	// Since is when the writer began to fail. With Err, it is the time of the first error, or Since
	// of a stale file that was read before.
	Since time.Time
	// Cause is printable and short; empty with Err.
	Cause string
	// Err is the error of reading or parsing the stale file, or nil.
	Err error
}

// Age returns the time since the last refresh: 0 if s is nil, otherwise at least a second, even
// if the clock of the writer is ahead.
func (s *Stale) Age(now time.Time) time.Duration {
	if s == nil {
		return 0
	}
	return max(time.Second, now.Sub(s.Since))
}

// Problem returns the text for status, or "" if s is nil. The text changes once a minute.
func (s *Stale) Problem(now time.Time) string {
	if s == nil {
		return ""
	}
	if s.Err != nil {
		return "may not be refreshed: " + s.Err.Error()
	}
	ago := ""
	if age := s.Age(now).Truncate(time.Minute); age > 0 {
		ago = " (" + strings.TrimSuffix(age.String(), "0s") + " ago)"
	}
	return "not refreshed since " + s.Since.UTC().Format(time.RFC3339) + ago + ": " + s.Cause
}

// parseStale parses the content of a stale file.
func parseStale(data []byte) (*Stale, error) {
	at, cause, _ := strings.Cut(strings.TrimSuffix(string(data), "\n"), " ")
	since, err := time.Parse(time.RFC3339, at)
	if err != nil || strings.TrimSpace(cause) == "" {
		return nil, fmt.Errorf("%s is not a time such as 2006-01-02T15:04:05Z, a space and a cause", quote(string(data)))
	}
	return &Stale{Since: since, Cause: quoteControls(cause)}, nil
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
	path := w.path + StaleSuffix
	data, err := files.Do(ctx, &w.staleCalls, path, func() ([]byte, error) { return files.Read(path, maxStaleFile) })
	if ctx.Err() != nil {
		return
	}
	var is *Stale
	if err == nil {
		is, err = parseStale(data)
	}
	was := w.stale.Load()
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		is = &Stale{Since: time.Now(), Err: fmt.Errorf("failed to read stale file %s: %w", path, err)}
		if was != nil {
			is.Since = was.Since
		}
	}
	// At the zero time the text has no age: it differs only for another cause or time.
	if was.Problem(time.Time{}) != is.Problem(time.Time{}) {
		w.stale.Set(is)
	}
}
