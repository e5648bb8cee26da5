package logs

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/vipgate/vipgate/test/harness"
)

// gatedOutput blocks each write until the gate permits it.
type gatedOutput struct {
	gate  chan struct{} // closed: writes do not block
	began chan struct{} // a write began; capacity 1

	mu      sync.Mutex
	text    strings.Builder
	refusal error // of every write
}

func newGatedOutput() *gatedOutput {
	return &gatedOutput{gate: make(chan struct{}), began: make(chan struct{}, 1)}
}

func (o *gatedOutput) Write(line []byte) (int, error) {
	select {
	case o.began <- struct{}{}:
	default:
	}
	<-o.gate
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.refusal != nil {
		return 0, o.refusal
	}
	return o.text.Write(line)
}

func (o *gatedOutput) refuse(err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.refusal = err
}

func (o *gatedOutput) lines() []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return strings.Split(strings.TrimSuffix(o.text.String(), "\n"), "\n")
}

// blocked returns a Writer that waits in the write of its first line.
func blocked(o *gatedOutput) *Writer {
	w := NewWriter(o)
	fmt.Fprintln(w, "first")
	<-o.began
	return w
}

func TestWriterKeepsOrder(t *testing.T) {
	out := newGatedOutput()
	close(out.gate)
	w := NewWriter(out)
	const lines = 5000
	for i := range lines {
		fmt.Fprintln(w, i)
	}
	w.Close()
	got := out.lines()
	for i := range lines {
		if i >= len(got) || got[i] != fmt.Sprint(i) {
			t.Fatalf("%d lines, line %d is not %d", len(got), i, i)
		}
	}
	if w.Lost() != 0 {
		t.Errorf("%d lines lost", w.Lost())
	}
}

// A blocked output loses the oldest lines, and the gap is stated at its position.
func TestWriterDropsOldest(t *testing.T) {
	for _, tt := range []struct {
		name    string
		line    string
		written int
		kept    int
	}{
		{"too many lines", "x", maxLines + 10, maxLines},
		{"too many bytes", strings.Repeat("x", maxBytes/16), 20, 15}, // the number makes each line longer
		{"line of all bytes", strings.Repeat("x", maxBytes), 2, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			out := newGatedOutput()
			w := blocked(out)
			for i := range tt.written {
				fmt.Fprintln(w, tt.line, i)
			}
			if w.Lost() != uint64(tt.written-tt.kept) || len(w.lines) != tt.kept || w.bytes > maxBytes {
				t.Errorf("%d lines lost; %d lines and %d bytes wait", w.Lost(), len(w.lines), w.bytes)
			}
			fmt.Fprintln(w, "last")
			lost := int(w.Lost())
			close(out.gate)
			w.Close()
			want := []string{"first", fmt.Sprintf("%d log lines lost", lost)}
			for i := lost; i < tt.written; i++ {
				want = append(want, fmt.Sprint(tt.line, " ", i))
			}
			want = append(want, "last")
			if got := out.lines(); !slices.Equal(got, want) {
				t.Errorf("%d lines %.60q, want %d", len(got), got, len(want))
			}
		})
	}
}

// The loss is stated in the format of the log, at every level.
func TestWriterReportsLoss(t *testing.T) {
	for _, format := range []string{"json", "text"} {
		t.Run(format, func(t *testing.T) {
			out := newGatedOutput()
			w := blocked(out)
			log, level, err := w.Logger(format, "error")
			if err != nil || level.String() != "error" {
				t.Fatal(level, err)
			}
			for range maxLines + 7 {
				log.Error("failed")
			}
			close(out.gate)
			w.Close()
			got := out.lines()[1]
			if format == "text" {
				if !strings.Contains(got, `level=WARN msg="7 log lines lost"`) {
					t.Error(got)
				}
				return
			}
			var line map[string]any
			if err := json.Unmarshal([]byte(got), &line); err != nil || line["msg"] != "7 log lines lost" {
				t.Error(got, err)
			}
		})
	}
}

// Rejected lines are lost, and stated once the output accepts lines again.
func TestWriterSurvivesRefusal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		out := newGatedOutput()
		close(out.gate)
		w := NewWriter(out)
		out.refuse(errors.New("broken pipe"))
		for range 3 {
			fmt.Fprintln(w, "refused")
		}
		synctest.Wait()
		if w.Lost() != 3 {
			t.Errorf("%d lines lost, want 3", w.Lost())
		}
		out.refuse(nil)
		fmt.Fprintln(w, "accepted")
		fmt.Fprintln(w, "last")
		w.Close()
		if got := strings.Join(out.lines(), ","); got != "3 log lines lost,accepted,last" {
			t.Error(got)
		}
	})
}

// Lines lost while a loss is written are stated next.
func TestWriterStatesEveryLoss(t *testing.T) {
	out := newGatedOutput()
	w := blocked(out)
	write := func(lines int) {
		for range lines {
			fmt.Fprintln(w, "line")
		}
	}
	write(maxLines + 5)
	out.gate <- struct{}{} // write of "first"
	<-out.began            // write of the loss
	write(8)               // room for one line
	close(out.gate)
	w.Close()
	if got := strings.Join(out.lines()[:4], ","); got != "first,5 log lines lost,line,7 log lines lost" || w.Lost() != 12 {
		t.Errorf("%s, %d lines lost", got, w.Lost())
	}
}

// Close waits for a blocked output for a second.
func TestWriterCloseIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		out := newGatedOutput()
		w := blocked(out)
		began := time.Now()
		w.Close()
		if after := time.Since(began); after != closeTimeout {
			t.Errorf("Close returned after %v, want %v", after, closeTimeout)
		}
		close(out.gate)
		<-w.done
	})
}

// Writing to a full pipe without a reader does not block.
func TestWriterToFullPipe(t *testing.T) {
	reader, output, err := os.Pipe()
	harness.Must(t, err)
	defer reader.Close()
	output.Fd() // blocking, as stderr is
	w := NewWriter(output)
	line := bytes.Repeat([]byte("x"), 100)
	const written = 3 * maxLines
	for range written {
		fmt.Fprintf(w, "%s\n", line)
	}
	lost := w.Lost()
	if lost == 0 {
		t.Fatal("no line was lost")
	}
	read := make(chan []string)
	go func() {
		var lines []string
		for s := bufio.NewScanner(reader); s.Scan(); {
			lines = append(lines, s.Text())
		}
		read <- lines
	}()
	w.Close()
	harness.Must(t, output.Close())
	lines, reports := <-read, 0
	for _, line := range lines {
		var n int
		if scanned, _ := fmt.Sscanf(line, "%d log lines lost", &n); scanned == 1 {
			reports += n
		}
	}
	if reports != int(lost) {
		t.Errorf("the log states %d lost lines, %d were lost", reports, lost)
	}
}

func BenchmarkWriter(b *testing.B) {
	w := NewWriter(io.Discard)
	defer w.Close()
	log, _, err := w.Logger("json", "info")
	harness.Must(b, err)
	for b.Loop() {
		log.Info("VIP changed", "vip", "20.0.0.1/32", "from", "ready", "to", "not ready")
	}
}
