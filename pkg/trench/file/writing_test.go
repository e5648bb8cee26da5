package file

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/files"
)

// A file that changes in place is read after it was stable for a second, and after ten seconds in
// any case.
func TestFileIsReadOnceStable(t *testing.T) {
	path := filepath.Join(t.TempDir(), "trench.yaml")
	stampOf := func(size int) files.Stamp {
		if err := os.WriteFile(path, []byte(strings.Repeat("x", size)), 0o600); err != nil {
			t.Fatal(err)
		}
		s, err := files.StampOf(path)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	a, b := stampOf(1), stampOf(2)
	begin := time.Now()
	var w writing
	for i, step := range []struct {
		at    time.Duration
		stamp files.Stamp
		want  time.Duration
	}{
		{0, a, stableTime},
		{stableTime / 2, a, stableTime / 2},
		{stableTime, b, stableTime}, // changed at the end of the wait
		{3 * stableTime / 2, b, stableTime / 2},
		{2*stableTime - 1, a, stableTime},
		{3 * stableTime, a, 0},
		{maxStableWait - stableTime/4, b, stableTime / 4}, // the wait is bounded
		{maxStableWait, a, 0},
	} {
		if got := w.remaining(step.stamp, begin.Add(step.at)); got != step.want {
			t.Errorf("%d: read after %v, want %v", i, got, step.want)
		}
	}
}
