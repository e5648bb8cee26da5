package file

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/fsnotify/fsnotify"

	"github.com/vipgate/vipgate/pkg/trench"
)

var staleSince = time.Date(2026, 11, 22, 10, 0, 1, 0, time.UTC)

const staleLine = "2026-11-22T10:00:01Z API server: connection refused\n"

// awaitStale waits until the problem of the watcher contains want, or is empty if want is.
func awaitStale(t *testing.T, w *Watcher, want string) *trench.Stale {
	t.Helper()
	timeout := time.After(patience)
	for {
		s, changed := w.Stale().Get()
		if got := s.Problem(time.Time{}); (want == "") == (got == "") && strings.Contains(got, want) {
			return s
		}
		select {
		case <-changed:
		case <-timeout:
			t.Fatalf("no problem like %q in %v: %+v", want, patience, s)
		}
	}
}

func TestStaleFileIsFollowed(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "trench.yaml")
	write(t, path, named("one"))
	replace(t, path+trench.StaleSuffix, staleLine)
	w := watch(t, path)
	s := w.Stale().Load() // read before the watcher is ready
	if s == nil || s.Err != nil || !s.Since.Equal(staleSince) || s.Cause != "API server: connection refused" {
		t.Errorf("at the start: %+v", s)
	}
	replace(t, path+trench.StaleSuffix, strings.Replace(staleLine, "connection refused", "no route to host", 1))
	awaitStale(t, w, "not refreshed since 2026-11-22T10:00:01Z: API server: no route to host")
	if err := os.Remove(path + trench.StaleSuffix); err != nil {
		t.Fatal(err)
	}
	awaitStale(t, w, "")
	write(t, path+trench.StaleSuffix, staleLine)
	awaitStale(t, w, "connection refused")
	if l := w.Value().Load(); l.Generation != 1 || l.Refused != 0 || l.Err != nil {
		t.Errorf("the configuration in force was touched: %+v", l)
	}
}

// A stale file does not change the configuration and does not notify its readers.
func TestStaleFileLeavesConfiguration(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "trench.yaml")
	write(t, path, named("one"))
	w := watch(t, path)
	_, changed := w.Value().Get()
	tests := []struct{ content, want string }{
		{staleLine, "connection refused"},
		{"", `stale file ` + path + `.stale: "" is not a time`},
		{"2026-11-22T10:00:01Z", `"2026-11-22T10:00:01Z" is not a time`},
		{"2026-11-22T10:00:01Z \n", `"2026-11-22T10:00:01Z \n" is not a time`},
		{"yesterday the cause", "is not a time"},
		{strings.Repeat("x", maxStaleFile), "is not a time"},
		{strings.Repeat("x", maxStaleFile+1), "is larger than 4 KiB"},
	}
	for _, tt := range tests {
		write(t, path+trench.StaleSuffix, tt.content)
		s := awaitStale(t, w, tt.want)
		if !s.Since.Equal(staleSince) {
			t.Errorf("%.40q: since %v, want the time of the file before", tt.content, s.Since)
		}
	}
	if err := os.Remove(path + trench.StaleSuffix); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(path+trench.StaleSuffix, 0o700); err != nil {
		t.Fatal(err)
	}
	awaitStale(t, w, "is not a regular file")
	select {
	case <-changed:
		t.Errorf("the configuration was set again: %+v", w.Value().Load())
	default:
	}
	replace(t, path, named("two"))
	awaitLoaded(t, w, "the next file", inForce("two"))
	awaitStale(t, w, "is not a regular file")
}

// The poll finds the stale file even if the trench file is rejected or missing.
func TestStaleFileBesideRefusedFile(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "trench.yaml")
	write(t, path, named("one"))
	w := watchWith(t, path, func() (*fsnotify.Watcher, error) { return nil, os.ErrPermission }, soon)
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	write(t, path+trench.StaleSuffix, staleLine)
	awaitStale(t, w, "connection refused")
	awaitLoaded(t, w, "the refusal", func(l trench.Loaded) bool { return l.Err != nil })
}

func TestStaleProblem(t *testing.T) {
	since := time.Date(2026, 11, 22, 11, 0, 1, 0, time.FixedZone("", 3600))
	s := &trench.Stale{Since: since, Cause: "cause"}
	const text = "not refreshed since 2026-11-22T10:00:01Z"
	for age, want := range map[time.Duration]string{
		-time.Hour:                    text + ": cause",
		59 * time.Second:              text + ": cause",
		3*time.Minute + time.Second:   text + " (3m ago): cause",
		10 * time.Minute:              text + " (10m ago): cause",
		26*time.Hour + 59*time.Second: text + " (26h0m ago): cause",
	} {
		if got := s.Problem(since.Add(age)); got != want {
			t.Errorf("after %v: %q, want %q", age, got, want)
		}
		if got := s.Age(since.Add(age)); got != max(age, time.Second) {
			t.Errorf("after %v: age %v", age, got)
		}
	}
	if s = nil; s.Age(since) != 0 || s.Problem(since) != "" {
		t.Errorf("without a file: %v, %q", s.Age(since), s.Problem(since))
	}
}

func TestStaleCause(t *testing.T) {
	const at = "2026-11-22T10:00:01Z "
	for cause, want := range map[string]string{
		"café ✓ \"x\" \\n":                   "café ✓ \"x\" \\n",
		"a\x1b[2Jb\r\nc\x00\xff\u202e":       `a\x1b[2Jb\r\nc\x00\xff\u202e`,
		strings.Repeat("é", maxCause):        strings.Repeat("é", maxCause/2) + "…",
		strings.Repeat("a", maxCause):        strings.Repeat("a", maxCause),
		strings.Repeat("\xff", maxCause/4):   strings.Repeat(`\xff`, maxCause/4),
		strings.Repeat("\xff", maxCause/2):   strings.Repeat(`\xff`, maxCause/4) + "…",
		"time in the cause " + staleLine[:9]: "time in the cause " + staleLine[:9],
	} {
		s, err := parseStale([]byte(at + cause + "\n"))
		if err != nil || s.Cause != want {
			t.Errorf("%q: got %+v, %v, want %q", cause, s, err, want)
		}
	}
}

// FuzzStale checks that a line results in a short printable cause or in an error on one line.
func FuzzStale(f *testing.F) {
	for _, line := range []string{
		staleLine, "", " ", "2026-11-22T10:00:01+01:00 x", "2026-11-22T10:00:01Z \x1b]0;x\a\xff", "9999-12-31T23:59:59Z y",
		"2026-11-22T10:00:01.5Z a\nb\n", "2026-11-22T10:00:01Z" + strings.Repeat(" ", 400),
	} {
		f.Add([]byte(line))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		s, err := parseStale(data)
		if (s == nil) == (err == nil) {
			t.Fatalf("got %v, %v", s, err)
		}
		if err != nil {
			checkLine(t, err.Error(), 700)
			return
		}
		now := time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)
		checkLine(t, s.Cause, maxCause+20)
		checkLine(t, s.Problem(now), maxCause+120)
		if s.Age(now) < time.Second {
			t.Errorf("age %v", s.Age(now))
		}
		again, err := parseStale([]byte(s.Since.Format(time.RFC3339Nano) + " " + s.Cause + "\n"))
		if len(s.Cause) <= maxCause && (err != nil || again.Cause != s.Cause || !again.Since.Equal(s.Since)) {
			t.Errorf("%+v is %+v, %v after it is written and read", s, again, err)
		}
	})
}

// checkLine checks that a text is one printable line of at most limit bytes.
func checkLine(t *testing.T, s string, limit int) {
	t.Helper()
	control := func(r rune) bool { return !strconv.IsPrint(r) }
	if len(s) > limit || !utf8.ValidString(s) || strings.ContainsFunc(s, control) {
		t.Errorf("%d bytes, or not printable: %q", len(s), s)
	}
}
