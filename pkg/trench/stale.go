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

// StaleSuffix is that of the file beside the trench file that its writer keeps while it cannot
// refresh the trench file: one line, an RFC 3339 time, a space and the cause.
const StaleSuffix = ".stale"

const (
	maxStaleFile = 4 << 10 // bytes
	maxCause     = 300     // bytes of a cause
)

// Stale is why the trench file may be older than what it is written from. Nil: it is current, or
// its writer does not say.
type Stale struct {
	// Since is when the writer began to fail. With Err, it is when that was first seen.
	Since time.Time
	// Cause is printable and short; empty with Err.
	Cause string
	// Err is why the stale file cannot be read or understood, or nil.
	Err error
}

// Age is how long the file has not been refreshed: 0 if s is nil, else at least a second, also when
// the clock of the writer is ahead.
func (s *Stale) Age(now time.Time) time.Duration {
	if s == nil {
		return 0
	}
	return max(time.Second, now.Sub(s.Since))
}

// Problem returns the sentence that status shows, "" if s is nil. It changes once a minute.
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

// quoteControls returns the text of another process on one line, cut short, with what cannot be
// printed written as in a Go string.
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

// readStale publishes what the stale file says. Its calls are not those of the trench file, so that
// neither delays the other for long.
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
	if was.Problem(time.Time{}) != is.Problem(time.Time{}) {
		w.stale.Set(is)
	}
}
