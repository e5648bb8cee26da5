package logs

import (
	"context"
	"encoding"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Level is the minimum level that is logged. It can change at any time.
type Level struct {
	current    slog.LevelVar
	configured slog.Level
}

func parseLevel(name string) (level slog.Level, err error) {
	// slog accepts an offset, too, as in "info+2".
	if level.UnmarshalText([]byte(name)) != nil || strings.ContainsAny(name, "+-") {
		return 0, fmt.Errorf("log level %q: use debug, info, warn or error", name)
	}
	return level, nil
}

// Set changes the level. The error lists the levels.
func (l *Level) Set(name string) error {
	level, err := parseLevel(name)
	if err != nil {
		return err
	}
	l.current.Set(level)
	return nil
}

// Reset restores the configured level.
func (l *Level) Reset() { l.current.Set(l.configured) }

// String returns the name of the level.
func (l *Level) String() string { return strings.ToLower(l.current.Level().String()) }

// New returns a logger that writes "json" or "text" to w, and its level.
func New(format, level string, w io.Writer) (*slog.Logger, *Level, error) {
	configured, err := parseLevel(level)
	if err != nil {
		return nil, nil, err
	}
	l := &Level{configured: configured}
	l.current.Set(configured)
	h := newHandler(format, w, &slog.HandlerOptions{Level: &l.current, ReplaceAttr: textValues})
	if h == nil {
		return nil, nil, fmt.Errorf("log format %q: use json or text", format)
	}
	return slog.New(h), l, nil
}

// newHandler returns the handler of a format, or nil for an unknown one.
func newHandler(format string, w io.Writer, options *slog.HandlerOptions) slog.Handler {
	switch format {
	case "json":
		return slog.NewJSONHandler(w, options)
	case "text":
		return slog.NewTextHandler(w, options)
	}
	return nil
}

// textValues makes the JSON handler write a [fmt.Stringer], such as a state, as text, not a number.
func textValues(_ []string, a slog.Attr) slog.Attr {
	if a.Value.Kind() != slog.KindAny {
		return a
	}
	switch v := a.Value.Any().(type) {
	// slog already writes these as text.
	case error, encoding.TextMarshaler, json.Marshaler:
	case fmt.Stringer:
		return slog.String(a.Key, v.String())
	}
	return a
}

// Text returns the text of an error, "" without one.
func Text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// Signals changes the level by SIGUSR1 and SIGUSR2. It implements task.Task.
type Signals struct {
	level    *Level
	log      *slog.Logger
	handlers map[os.Signal]func()
	signals  chan os.Signal
}

// NewSignals returns a task: SIGUSR1 lowers the level by one step, SIGUSR2 restores the
// configured level. After the call, the signals do not end the process.
func NewSignals(level *Level, log *slog.Logger) *Signals {
	return HandleSignals(level, log, map[os.Signal]func(){
		syscall.SIGUSR1: func() {
			const step = slog.LevelInfo - slog.LevelDebug
			level.current.Set(max(slog.LevelDebug, level.current.Level()-step))
		},
		syscall.SIGUSR2: level.Reset,
	})
}

// HandleSignals returns a task with other effects of SIGUSR1 and SIGUSR2.
func HandleSignals(level *Level, log *slog.Logger, handlers map[os.Signal]func()) *Signals {
	s := &Signals{level: level, log: log, handlers: handlers, signals: make(chan os.Signal, 4)}
	signal.Notify(s.signals, syscall.SIGUSR1, syscall.SIGUSR2)
	return s
}

// String implements task.Task.
func (s *Signals) String() string { return "log level signals" }

// Run handles signals until ctx ends.
func (s *Signals) Run(ctx context.Context) error {
	defer signal.Stop(s.signals)
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case sig := <-s.signals:
			before := s.level.String()
			s.handlers[sig]()
			// At level warn, the line must appear, too.
			s.log.Warn("log level changed", "from", before, "to", s.level.String(), "signal", sig.String())
		}
	}
}

const (
	throttleBurst    = 3
	throttleInterval = 10 * time.Second
	throttleKeys     = 256 // bounds the memory that unauthenticated peers can use
)

// Throttle limits the lines per key: a burst of three, then one every ten seconds. A peer that
// retries every 50 ms neither fills the disk nor hides another. The zero Throttle is ready for use.
type Throttle struct {
	mu   sync.Mutex
	keys map[string]bucket
}

type bucket struct {
	full       time.Time // when it is full again
	suppressed int       // lines since the last one that was written
}

// Log calls write, such as the Warn of a logger, unless key and message have reached the limit.
func (t *Throttle) Log(write func(string, ...any), key, message string, attrs ...any) {
	suppressed, ok := t.take(message+" "+key, time.Now())
	if !ok {
		return
	}
	if suppressed > 0 {
		attrs = append(attrs, "suppressed", suppressed)
	}
	write(message, attrs...)
}

// take reports whether a line may be written, and how many were suppressed before it.
func (t *Throttle) take(key string, now time.Time) (suppressed int, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.keys == nil {
		t.keys = make(map[string]bucket)
	}
	// A full bucket limits nothing, so it can be removed.
	if _, known := t.keys[key]; !known && len(t.keys) >= throttleKeys {
		maps.DeleteFunc(t.keys, func(_ string, b bucket) bool { return !b.full.After(now) })
		if len(t.keys) >= throttleKeys {
			key = "" // further keys share one bucket
		}
	}
	b := t.keys[key]
	if b.full.Before(now) {
		b.full = now
	}
	if b.full.Sub(now) > (throttleBurst-1)*throttleInterval {
		b.suppressed++
		t.keys[key] = b
		return 0, false
	}
	t.keys[key] = bucket{full: b.full.Add(throttleInterval)}
	return b.suppressed, true
}
