package file

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/vipgate/vipgate/pkg/durable"
	"github.com/vipgate/vipgate/pkg/files"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/logs"
	"github.com/vipgate/vipgate/pkg/tick"
	"github.com/vipgate/vipgate/pkg/trench"
)

const (
	// trialTime is how long the process must run well with a configuration before it is good.
	trialTime = 10 * time.Second
	// slow is how late a loop may be during trialTime, hung how late a loop of a hung process is.
	slow, hung = time.Second, 10 * time.Second
	// maxStarts is how often a file is accepted whose process then ends within trialTime without a
	// known cause. SIGKILL right after an edit must not refuse a good file.
	maxStarts = 2
)

// Trial keeps the last good configuration in a state directory, and refuses a file that crashed or
// hung an earlier process right after its acceptance; see docs/adr/0042-last-good-configuration.md.
// It implements task.Task. A nil Trial accepts every file.
type Trial struct {
	// Overdue returns how late the latest loop of the process is. It is set before Run.
	Overdue func() time.Duration

	dir     string
	log     *slog.Logger
	calls   files.Calls
	started chan struct{} // wakes Run

	mu        sync.Mutex
	record    record
	before    record // of Begin, for Cancel and End
	saved     record // last written
	running   bool   // Run was called: the start was not refused
	lock      *files.Lock
	deferred  bool // until Run nothing is written: the start may be refused
	candidate *accepted
	newest    *accepted
	refused   error
	base      *trench.Config // of Base
	failure   string         // last error of a write
}

type record struct {
	// Digest is the file on trial, or that failed; "" if there is none.
	Digest string `json:"digest,omitempty"`
	// Starts counts how often it was accepted since it was last edited.
	Starts int `json:"starts,omitempty"`
	// Cause is why the process failed; "" if that is unknown.
	Cause string `json:"cause,omitempty"`
	// Good is the digest of the last good file, of which Held removals were not in force.
	Good string `json:"good,omitempty"`
	Held bool   `json:"held,omitempty"`
}

// accepted is a configuration on trial.
type accepted struct {
	digest string
	config *trench.Config
	held   bool
}

// OpenTrial returns the trial in a state directory, or nil if dir is "". State that cannot be read
// counts as none: it must not prevent the start.
func OpenTrial(dir string, log *slog.Logger) *Trial {
	if dir == "" {
		return nil
	}
	trial := &Trial{
		dir: dir, log: log, started: make(chan struct{}, 1), Overdue: func() time.Duration { return 0 },
	}
	_, err := files.Do(context.Background(), &files.Calls{}, trial.path("trial.json"), func() (bool, error) {
		lock, err := files.TryLock(trial.path("trial.lock"))
		trial.lock, trial.deferred = lock, errors.Is(err, fs.ErrNotExist) || errors.Is(err, files.ErrLocked)
		_, found, err := durable.Read(trial.path("trial.json"), &trial.record)
		return found, err
	})
	if err != nil {
		log.Warn("failed to read the trial of the trench file, accepting every file", "error", err)
		trial.record = record{}
	}
	trial.before, trial.saved = trial.record, trial.record
	return trial
}

func (trial *Trial) path(name string) string { return filepath.Join(trial.dir, name) }

// String names the task.
func (*Trial) String() string { return "trench-trial" }

// Read is [Read]. If an earlier process failed with the file, it returns the last good
// configuration, with the digest of the refused file, and an error. It begins the trial before it
// parses the file, because parsing may kill the process, too.
func (trial *Trial) Read(path string, defaults trench.Defaults) (*trench.Config, error) {
	if trial == nil {
		return Read(path, defaults)
	}
	data, err := read(path)
	if err != nil {
		return nil, err
	}
	digest := sha256.Sum256(data)
	if refused := trial.refuses(path, hex.EncodeToString(digest[:])); refused != nil {
		if good := trial.lastGood(defaults); good != nil {
			good.Digest, trial.refused = digest, refused
			return good, refused
		}
		// Without VIPs nothing is served: the file may work now.
		trial.log.Warn("accepting the trench file again", "refused", refused)
	}
	trial.Begin(digest)
	config, err := Parse(path, data, defaults)
	if err != nil {
		trial.Cancel()
		return nil, err
	}
	config.Digest = digest
	// A file that is in force completely removes nothing.
	if good := trial.record.Good; good != "" && (good != hex.EncodeToString(digest[:]) || trial.record.Held) {
		trial.base = trial.lastGood(defaults)
	}
	trial.Accept(digest, config, false)
	return config, nil
}

// lastGood returns the last good configuration, or nil.
func (trial *Trial) lastGood(defaults trench.Defaults) *trench.Config {
	good, err := Read(trial.path("last-good.yaml"), defaults)
	if err != nil {
		trial.log.Warn("no last good configuration", "error", err)
	}
	return good
}

// Base returns the configuration that an earlier process had in force if the file at the start
// differs from it, or nil.
func (trial *Trial) Base() *trench.Config {
	if trial == nil {
		return nil
	}
	return trial.base
}

// refuses returns why a file is refused, or nil. Like for an invalid file, the targets of the
// configuration in force stay.
func (trial *Trial) refuses(path, digest string) error {
	record := trial.record
	if record.Digest != digest || record.Good == digest || record.Cause == "" && record.Starts < maxStarts {
		return nil
	}
	cause := cmp.Or(record.Cause, fmt.Sprintf("the process ended %d times without a known cause", record.Starts))
	rejected := &Errors{file: path}
	rejected.add(1, 1, "", fmt.Sprintf("the process failed within %v of accepting the file with SHA-256 %s (%s), and the "+
		"last good configuration is in force: correct the file, or change a comment in it to try it again",
		trialTime, digest, cause))
	return rejected
}

// Refused returns why Read refused the file at the start, or nil.
func (trial *Trial) Refused() error {
	if trial == nil {
		return nil
	}
	return trial.refused
}

// change calls a function under the lock and saves a changed record, if there is a trial.
func (trial *Trial) change(change func()) {
	if trial == nil {
		return
	}
	trial.mu.Lock()
	defer trial.mu.Unlock()
	// A start that will be refused neither creates a directory nor changes another process's trial.
	if change(); trial.record != trial.saved && (trial.running || !trial.deferred) {
		trial.save()
	}
}

// Begin records, before a file is parsed, that it is on trial.
func (trial *Trial) Begin(content [sha256.Size]byte) {
	trial.change(func() {
		trial.before = trial.record
		switch digest := hex.EncodeToString(content[:]); digest {
		case trial.record.Good:
			trial.record = record{Good: digest, Held: trial.record.Held}
		case trial.record.Digest:
			// Whenever a hold changes, the process accepts the same file again.
			if trial.newest == nil || trial.newest.digest != digest {
				trial.record.Starts, trial.record.Cause = trial.record.Starts+1, ""
			}
		default:
			trial.record = record{Digest: digest, Starts: 1, Good: trial.record.Good, Held: trial.record.Held}
		}
	})
}

// Cancel ends the trial of a file that is invalid.
func (trial *Trial) Cancel() { trial.change(func() { trial.record = trial.before }) }

// Accept records the configuration in force with the file; held: without some of its removals.
func (trial *Trial) Accept(digest [sha256.Size]byte, config *trench.Config, held bool) {
	trial.change(func() {
		trial.newest = &accepted{hex.EncodeToString(digest[:]), config, held}
		switch {
		// The edit was reverted: it never becomes good, and a kill of the process soon after the revert
		// does not count against the good file.
		case trial.newest.digest == trial.record.Good && held == trial.record.Held:
			trial.candidate = nil
		case trial.candidate == nil:
			trial.candidate = trial.newest
			latest.Wake(trial.started)
		// Removals of the file were held or confirmed. While files change all the time, the older one
		// becomes good after its time.
		case trial.candidate.digest == trial.newest.digest:
			trial.candidate = trial.newest
		}
	})
}

// Run makes configurations good with which the process runs well.
func (trial *Trial) Run(ctx context.Context) error {
	trial.change(func() { trial.running = true })
	var timer <-chan time.Time // nil until a check is due
	var since time.Time
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-trial.started:
			since = time.Now()
		case <-timer:
			since = trial.check(since)
		}
		// Without a candidate the process needs no wakeups.
		if !since.IsZero() {
			timer = time.After(tick.Until(time.Now(), time.Second))
		}
	}
}

// check returns since when the process runs well with the candidate, or zero without a candidate.
func (trial *Trial) check(since time.Time) time.Time {
	now, overdue := time.Now(), trial.Overdue()
	trial.mu.Lock()
	defer trial.mu.Unlock()
	if trial.candidate == nil {
		return time.Time{}
	}
	// The probe of the kubelet will end a hung process, without a chance to record the cause then.
	cause := ""
	if overdue >= hung {
		cause = "a task of the process hung"
	}
	if cause != trial.record.Cause && trial.record.Digest != "" {
		trial.record.Cause = cause
		trial.save()
	}
	if overdue >= slow {
		return now
	}
	if now.Sub(since) < trialTime {
		return since
	}
	return trial.succeed(now)
}

// succeed makes the candidate the last good configuration, and begins the time of a newer one.
func (trial *Trial) succeed(now time.Time) time.Time {
	good := trial.candidate
	trial.candidate = nil
	if trial.record.Digest == good.digest {
		trial.record = record{Good: trial.record.Good, Held: trial.record.Held}
	}
	// During a hold the configuration from before it stays: VIPs that the same file adds would make
	// the removal a small one after a restart.
	if !good.held || trial.record.Good == "" {
		trial.write("last-good.yaml", func(path string) error {
			return durable.Replace(path, Marshal(good.config), 0o600)
		})
		trial.record.Good, trial.record.Held = good.digest, good.held
	}
	trial.save()
	if trial.newest == good {
		return time.Time{}
	}
	trial.candidate = trial.newest
	return now
}

// Fail records why the process ends, if a configuration is on trial.
func (trial *Trial) Fail(err error) {
	trial.change(func() {
		if err != nil && trial.candidate != nil && trial.record.Digest != "" {
			// The stack of a panic follows in the next lines.
			cause, _, _ := strings.Cut(err.Error(), "\n")
			trial.record.Cause = quoteControls(cause)
		}
	})
}

// End ends the trial when the process ends as it should, or cancels that of a refused start. It is
// not deferred: a panic counts.
func (trial *Trial) End() {
	trial.change(func() {
		switch {
		case trial.record.Cause != "":
		case !trial.running:
			trial.record = trial.before
		case trial.candidate != nil:
			trial.record = record{Good: trial.record.Good, Held: trial.record.Held}
		}
	})
}

func (trial *Trial) save() {
	record := trial.record
	trial.saved = record
	trial.write("trial.json", func(path string) error { return durable.Write(path, record) })
}

// write writes a file in bounded time. An error must not refuse an edit, so it is only logged.
func (trial *Trial) write(name string, write func(path string) error) {
	path := trial.path(name)
	_, err := files.Do(context.Background(), &trial.calls, path, func() (struct{}, error) {
		return struct{}{}, errors.Join(os.MkdirAll(trial.dir, 0o700), write(path))
	})
	failure := logs.Text(err)
	if failure != "" && failure != trial.failure {
		trial.log.Warn("failed to keep the last good configuration; a restart accepts every trench file",
			"error", err)
	}
	trial.failure = failure
}
