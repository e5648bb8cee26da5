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

func parseStale(data []byte) (*trench.Stale, error) {
	at, cause, _ := strings.Cut(strings.TrimSuffix(string(data), "\n"), " ")
	since, err := time.Parse(time.RFC3339, at)
	if err != nil || strings.TrimSpace(cause) == "" {
		return nil, fmt.Errorf("%s is not a time such as 2006-01-02T15:04:05Z, a space and a cause",
			trench.Quote(string(data)))
	}
	return &trench.Stale{Since: since, Cause: quoteControls(cause)}, nil
}

// quoteControls returns text from another process on one line, truncated, with unprintable
// characters escaped as in a Go string.
func quoteControls(text string) string {
	var quoted strings.Builder
	for len(text) > 0 && quoted.Len() < maxCause {
		character, size := utf8.DecodeRuneInString(text)
		if strconv.IsPrint(character) && (character != utf8.RuneError || size > 1) {
			quoted.WriteString(text[:size])
		} else {
			escaped := strconv.Quote(text[:size])
			quoted.WriteString(escaped[1 : len(escaped)-1])
		}
		text = text[size:]
	}
	if text != "" {
		quoted.WriteString("…")
	}
	return quoted.String()
}

// readStale publishes the content of the stale file. Its calls are separate from the calls for
// the trench file, so that a hang of one file delays the other only briefly.
func (watcher *Watcher) readStale(ctx context.Context) {
	path := watcher.path + trench.StaleSuffix
	data, err := files.Do(ctx, &watcher.staleCalls, path, func() ([]byte, error) { return files.Read(path, maxStaleFile) })
	if ctx.Err() != nil {
		return
	}
	var current *trench.Stale
	if err == nil {
		current, err = parseStale(data)
	}
	previous := watcher.stale.Load()
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		current = &trench.Stale{Since: time.Now(), Err: fmt.Errorf("failed to read stale file %s: %w", path, err)}
		if previous != nil {
			current.Since = previous.Since
		}
	}
	// At the zero time the text has no age: it differs only for another cause or time.
	if previous.Problem(time.Time{}) != current.Problem(time.Time{}) {
		watcher.stale.Set(current)
	}
}
