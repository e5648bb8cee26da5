package logs

import (
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"
)

const (
	// maxLines and maxBytes limit the lines that wait for the output: at 250 bytes per line they
	// hold 2 MiB, some seconds at the highest rate that a container runtime reads.
	maxLines = 8192
	maxBytes = 2 << 20
	// closeTimeout limits the wait of Close for an output that blocks.
	closeTimeout = time.Second
)

// Writer writes lines to an output such as stderr without waiting for it: one goroutine writes
// them in order. While the output blocks, such as a pipe with a hanging reader, the newest 8 192
// lines and 2 MiB are kept. The oldest lines are dropped and counted, and the next line after the
// gap states their number. A line that the output rejects is lost as well. Methods are safe for
// concurrent use.
type Writer struct {
	out  io.Writer
	done chan struct{} // closed once the goroutine has ended

	mu         sync.Mutex
	waiting    sync.Cond // signals a line, or closed
	lines      [][]byte  // oldest first
	bytes      int       // in lines
	closed     bool
	lost       uint64                // since the start
	unreported uint64                // lost lines that the output does not state yet
	report     func(n uint64) []byte // returns the line that states n lost lines
}

// NewWriter returns a Writer whose goroutine runs until Close.
func NewWriter(out io.Writer) *Writer {
	w := &Writer{
		out: out, done: make(chan struct{}),
		report: func(n uint64) []byte { return fmt.Appendf(nil, "%d log lines lost\n", n) },
	}
	w.waiting.L = &w.mu
	go w.run()
	return w
}

// Logger returns a logger that writes "json" or "text" lines, and its level. Lost lines are stated
// in the same format, whatever the level.
func (w *Writer) Logger(format, level string) (*slog.Logger, *Level, error) {
	log, l, err := New(format, level, w)
	if err != nil {
		return nil, nil, err
	}
	var line bytes.Buffer // used only by the goroutine of the Writer
	reporter := slog.New(newHandler(format, &line, nil))
	report := func(n uint64) []byte {
		line.Reset()
		reporter.Warn(fmt.Sprintf("%d log lines lost", n), "cause", "the output did not accept them in time")
		return line.Bytes()
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.report = report
	return log, l, nil
}

// Write queues a line. It does not block and does not fail.
func (w *Writer) Write(line []byte) (int, error) {
	if len(line) == 0 {
		return 0, nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	// slog reuses the buffer of the line after Write.
	w.lines, w.bytes = append(w.lines, bytes.Clone(line)), w.bytes+len(line)
	for len(w.lines) > maxLines || w.bytes > maxBytes {
		w.take()
		w.drop(1)
	}
	w.waiting.Signal()
	return len(line), nil
}

// take removes the oldest line. The caller holds mu.
func (w *Writer) take() (line []byte) {
	line = w.lines[0]
	w.lines[0] = nil // release the line; the array stays in use
	w.lines, w.bytes = w.lines[1:], w.bytes-len(line)
	return line
}

// drop counts lost lines. The caller holds mu.
func (w *Writer) drop(n uint64) {
	w.lost += n
	w.unreported += n
}

// Lost returns the number of lines that were lost since the start.
func (w *Writer) Lost() uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.lost
}

// Close writes the queued lines for at most a second. Later lines may be lost.
func (w *Writer) Close() {
	w.mu.Lock()
	w.closed = true
	w.waiting.Signal()
	w.mu.Unlock()
	select {
	case <-w.done:
	case <-time.After(closeTimeout): // a write that blocks ends with the process
	}
}

// run writes lines until Close, and then the queued lines.
func (w *Writer) run() {
	defer close(w.done)
	for {
		line, unreported, report := w.next()
		if line == nil {
			return
		}
		// The lost lines are older than this line and newer than the lines already written.
		if unreported > 0 && w.write(report(unreported)) {
			w.mu.Lock()
			w.unreported -= unreported
			w.mu.Unlock()
		}
		if !w.write(line) {
			w.mu.Lock()
			w.drop(1)
			w.mu.Unlock()
		}
	}
}

// next waits for the next line and returns it with the number of lost ones before; nil after Close.
func (w *Writer) next() (line []byte, unreported uint64, report func(uint64) []byte) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for len(w.lines) == 0 {
		if w.closed {
			return nil, 0, nil
		}
		w.waiting.Wait()
	}
	return w.take(), w.unreported, w.report
}

// write reports whether the output accepted the line. The error itself cannot be reported.
func (w *Writer) write(line []byte) bool {
	_, err := w.out.Write(line)
	return err == nil
}

// Line returns text as one line of valid UTF-8 of at most maxBytes. The text may be an error of an
// external system, and is written to logs, terminals and protobuf strings.
func Line(text string, maxBytes int) string {
	if isLine(text, maxBytes) {
		return text
	}
	text = strings.Map(func(char rune) rune {
		if !unicode.IsPrint(char) {
			return ' '
		}
		return char
	}, text[:min(len(text), maxBytes+utf8.UTFMax)])
	for len(text) > maxBytes {
		_, size := utf8.DecodeLastRuneInString(text)
		text = text[:len(text)-size]
	}
	return strings.TrimSpace(text)
}

// isLine reports whether text is printable ASCII that Line would not change, as most texts are.
func isLine(text string, maxBytes int) bool {
	if len(text) > maxBytes || strings.TrimSpace(text) != text {
		return false
	}
	for i := range len(text) {
		if text[i] < ' ' || text[i] > '~' {
			return false
		}
	}
	return true
}
