package readinessfile

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/task"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
)

var (
	_ task.Task = (*Reader)(nil)

	vipOne  = vip.Require("20.0.0.1/32")
	vipTwo  = vip.Require("2000::2/128")
	vipWide = vip.Require("20.0.1.0/24")

	someStreams = []string{"a", "b"}
	someVIPs    = []vip.VIP{vipOne, vipTwo, vipWide}
)

// testReader is a running Reader of a test directory.
type testReader struct {
	*Reader
	t    *testing.T
	path string
	stop func()
}

// runReader runs a Reader. Its rescan interval is so long that it detects changes only by
// notifications, unless change sets another interval.
func runReader(t *testing.T, path string, o Options, change func(*Reader)) *testReader {
	t.Helper()
	o.Path, o.OnGone, o.Log = path, Drop, discard
	d := NewReader(o)
	d.rescan = time.Hour
	d.Configure(someStreams, someVIPs)
	if change != nil {
		change(d)
	}
	f := &testReader{Reader: d, t: t, path: path}
	f.stop = harness.Run(t, func(ctx context.Context) error { return task.Guard(ctx, d.String(), d.Run) })
	f.wait("scanned", func(l Listing) bool { return l.Scanned })
	return f
}

func (f *testReader) file(name string) string { return filepath.Join(f.path, name) }

func (f *testReader) make(names ...string) {
	f.t.Helper()
	for _, name := range names {
		touchFile(f.t, f.file(name))
	}
}

func touchFile(t *testing.T, path string) {
	t.Helper()
	must(t, os.WriteFile(path, nil, 0o600))
}

func (f *testReader) remove(names ...string) {
	f.t.Helper()
	for _, name := range names {
		must(f.t, os.Remove(f.file(name)))
	}
}

var must = harness.Must

// wait waits for a listing that satisfies the condition.
func (f *testReader) wait(what string, wanted func(Listing) bool) Listing {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), await.Timeout)
	defer cancel()
	var l Listing
	if f.Value().Wait(ctx, func(next Listing) bool { l = next; return wanted(l) }) != nil {
		f.t.Fatalf("timed out: %s: %+v", what, l)
	}
	return l
}

// wantReady waits until exactly the given VIPs are ready. Stream a serves the first VIP, stream b
// the remaining VIPs.
func (f *testReader) wantReady(vips ...vip.VIP) Listing {
	f.t.Helper()
	return f.wait(fmt.Sprintf("ready: %v", vips), func(l Listing) bool { return slices.Equal(readyVIPs(l), vips) })
}

func readyVIPs(l Listing) []vip.VIP {
	var list []vip.VIP
	for _, v := range someVIPs {
		streams := []string{"b"}
		if v == vipOne {
			streams = []string{"a"}
		}
		if ready, _ := l.Ready(v, streams); ready {
			list = append(list, v)
		}
	}
	return list
}

// A file appears or vanishes at each moment around the start of the Reader, without a later rescan.
func TestNoWakeUpIsLostAroundTheStart(t *testing.T) {
	const workers, races = 10, 100
	top := t.TempDir()
	var lost atomic.Int64
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			for i := range races {
				path := filepath.Join(top, fmt.Sprint(w, "-", i))
				seen, err := race(t.Context(), path, i%2 == 0)
				if err != nil {
					t.Error(err)
					return
				}
				if !seen {
					lost.Add(1)
				}
			}
		})
	}
	wg.Wait()
	if n := lost.Load(); n > 0 {
		t.Errorf("%d of %d wake-ups were lost", n, workers*races)
	}
}

// raceTime is the timeout of a race. A rescan would detect a lost event only an hour later.
const raceTime = 10 * time.Second

// race creates or removes a file at some moment around the start of a Reader and reports whether
// the Reader detected the change.
func race(ctx context.Context, path string, appears bool) (seen bool, err error) {
	if err := os.Mkdir(path, 0o755); err != nil {
		return false, err
	}
	file := filepath.Join(path, "lb-ready-a")
	change := func() error { return os.WriteFile(file, nil, 0o600) }
	if !appears {
		if err := change(); err != nil {
			return false, err
		}
		change = func() error { return os.Remove(file) }
	}
	d := NewReader(Options{Path: path, OnGone: Drop, Log: discard})
	d.rescan = time.Hour
	d.Configure(someStreams, someVIPs)
	ctx, cancel := context.WithTimeout(ctx, raceTime)
	ended := make(chan error, 1)
	go func() { ended <- d.Run(ctx) }()
	pause := rand.N(400 * time.Microsecond)
	for begin := time.Now(); time.Since(begin) < pause; {
		runtime.Gosched()
	}
	err = change()
	if err == nil {
		seen = d.Value().Wait(ctx, func(l Listing) bool {
			_, exists := l.Files["lb-ready-a"]
			return l.Scanned && exists == appears
		}) == nil
	}
	cancel()
	<-ended
	return seen, err
}

func TestReadinessFiles(t *testing.T) {
	f := runReader(t, t.TempDir(), Options{}, nil)
	f.wantReady() // a directory without files
	f.make("lb-ready-a", "other")
	f.wantReady(vipOne)
	f.make("lb-ready-b")
	f.wantReady(vipOne, vipTwo, vipWide)
	f.remove("lb-ready-a")
	f.wantReady(vipTwo, vipWide)

	// After the first file of a VIP only such files count, with any notation of the address.
	f.make("lb-vip-ready-2000:0:0::0002")
	f.wantReady(vipTwo)
	f.make("lb-vip-ready-20.0.1.0", "lb-vip-ready-::ffff:20.0.0.1")
	f.wantReady(vipOne, vipTwo, vipWide)
	f.remove("lb-vip-ready-2000:0:0::0002", "lb-vip-ready-20.0.1.0", "lb-vip-ready-::ffff:20.0.0.1")
	l := f.wantReady()
	if !l.PerVIP || len(l.Problems) > 0 {
		t.Errorf("%+v", l)
	}
	if _, why := l.Ready(vipOne, []string{"a"}); !strings.Contains(why, "lb-vip-ready-20.0.0.1") {
		t.Errorf("the reason %q does not name the file that is missing", why)
	}
}

func TestAnyGroupMakesAllReadyWithoutStreams(t *testing.T) {
	f := runReader(t, t.TempDir(), Options{}, func(d *Reader) { d.Configure(nil, someVIPs) })
	f.make("lb-ready-whatever")
	l := f.wantReady(someVIPs...)
	if len(l.Problems) > 0 {
		t.Error(l.Problems)
	}
	// With streams the group is unknown.
	f.Configure(someStreams, someVIPs)
	l = f.wantReady()
	wantProblems(t, l, `"lb-ready-whatever": the trench file has no stream of this name`)
	if ready, why := l.Ready(vipOne, nil); ready || why != "no stream serves it" {
		t.Error(ready, why)
	}
}

func wantProblems(t *testing.T, l Listing, texts ...string) {
	t.Helper()
	for _, text := range texts {
		if !slices.ContainsFunc(l.Problems, func(p string) bool { return strings.Contains(p, text) }) {
			t.Errorf("no problem %s among %q", text, l.Problems)
		}
	}
	if len(l.Problems) != len(texts) {
		t.Errorf("%d problems, want %d: %q", len(l.Problems), len(texts), l.Problems)
	}
}

func TestOtherFilesAreReported(t *testing.T) {
	path := t.TempDir()
	f := &testReader{t: t, path: path}
	f.make("lb-ready-", "lb-ready-c", "lb-vip-ready-", "lb-vip-ready-20.0.0.1_32", "lb-vip-ready-fe80::1%eth0",
		"lb-vip-ready-20.0.0.9", "lb-vip-ready-\n", "unrelated")
	must(t, os.Mkdir(f.file("lb-ready-a"), 0o755))
	must(t, syscall.Mkfifo(f.file("lb-vip-ready-20.0.1.0"), 0o600))
	must(t, os.Symlink("nowhere", f.file("lb-vip-ready-2000::2")))
	must(t, os.Symlink(f.file("unrelated"), f.file("lb-vip-ready-20.0.0.1")))
	f = runReader(t, path, Options{}, nil)
	l := f.wantReady(vipOne)
	wantProblems(t, l,
		`"lb-ready-": it names no group`, `"lb-ready-c": the trench file has no stream`,
		`"lb-vip-ready-": "" is not an IP address`, `"lb-vip-ready-20.0.0.1_32": "20.0.0.1_32" is not an IP address`,
		`"lb-vip-ready-fe80::1%eth0": "fe80::1%eth0" has a zone`, `"lb-vip-ready-20.0.0.9": no VIP of the attractor`,
		`"lb-vip-ready-\n": "\n" is not an IP address`, `"lb-ready-a": is not a regular file`,
		`"lb-vip-ready-20.0.1.0": is not a regular file`,
		`"lb-vip-ready-2000::2": is a symlink to a file that does not exist`)
}

func TestProblemsAreBounded(t *testing.T) {
	path := t.TempDir()
	f := &testReader{t: t, path: path}
	for i := range maxProblems + 5 {
		f.make(fmt.Sprintf("lb-ready-x%d", i))
	}
	f = runReader(t, path, Options{}, nil)
	l := f.Value().Load()
	if len(l.Problems) != maxProblems+1 || !strings.Contains(l.Problems[maxProblems], "and 5 more") {
		t.Errorf("%q", l.Problems)
	}
}

// Entries that are no readiness files do not count.
func TestFilesAreBounded(t *testing.T) {
	f := &testReader{t: t, path: t.TempDir()}
	for i := range 20 {
		f.make(fmt.Sprint("unrelated-", i))
	}
	const most = 3
	for i := range most + 1 {
		f.make(fmt.Sprint("lb-ready-", i))
		var found scanResult
		(&scanner{path: f.path, most: most}).scan(&found)
		if is := i + 1; is <= most && (found.err != nil || len(found.files) != is) ||
			is > most && (found.err == nil || !strings.Contains(found.err.Error(), "more than 3 readiness files")) {
			t.Errorf("%d files of at most %d: %d found, %v", is, most, len(found.files), found.err)
		}
	}
}

func TestAThousandFilesAreOneDecision(t *testing.T) {
	path := t.TempDir()
	var streams []string
	for i := range 1000 {
		streams = append(streams, fmt.Sprintf("s%d", i))
	}
	f := runReader(t, path, Options{}, func(d *Reader) { d.Configure(streams, nil) })
	revision, scans, begin := f.Value().Load().Revision, f.scans.Load(), time.Now()
	// One decision and one scan, as long as no two files are created raiseQuiet apart:
	// on a busy machine each such pause makes another.
	bounded := func(what string, n uint64) {
		t.Helper()
		if most := 2 + uint64(time.Since(begin)/raiseQuiet); n > most {
			t.Errorf("%d %s, in a time for %d", n, what, most)
		}
	}
	for _, s := range streams {
		f.make("lb-ready-" + s)
	}
	l := f.wait("all", func(l Listing) bool { return len(l.Files) == len(streams) })
	t.Logf("%d decisions, %d scans", l.Revision-revision, f.scans.Load()-scans)
	bounded("decisions", l.Revision-revision)
	bounded("scans", f.scans.Load()-scans)
	for _, s := range streams {
		f.remove("lb-ready-" + s)
	}
	f.wait("none", func(l Listing) bool { return len(l.Files) == 0 })
	bounded("scans", f.scans.Load()-scans)
}

func TestDirectoryIsWaitedFor(t *testing.T) {
	for name, inItsPlace := range map[string]func(t *testing.T, path string){
		"nothing":             func(*testing.T, string) {},
		"a file":              func(t *testing.T, path string) { touchFile(t, path) },
		"a symlink loop":      func(t *testing.T, path string) { must(t, os.Symlink(path, path)) },
		"a symlink to naught": func(t *testing.T, path string) { must(t, os.Symlink("nowhere", path)) },
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "d")
			inItsPlace(t, path)
			f := runReader(t, path, Options{}, nil)
			l := f.wantReady()
			if !l.Scanned || !l.Gone || !strings.Contains(l.Err.Error(), path) {
				t.Fatalf("%+v", l)
			}
			if _, why := l.Ready(vipOne, []string{"a"}); !strings.Contains(why, path) {
				t.Errorf("the reason %q does not name the directory", why)
			}
			_ = os.Remove(path)
			must(t, os.Mkdir(path, 0o755))
			f.make("lb-ready-a")
			if l := f.wantReady(vipOne); l.Gone {
				t.Errorf("%+v", l)
			}
		})
	}
}

func TestRescanFindsNewParentDirectory(t *testing.T) {
	parent := filepath.Join(t.TempDir(), "p")
	f := runReader(t, filepath.Join(parent, "d"), Options{}, func(d *Reader) { d.rescan = 10 * time.Millisecond })
	f.wantReady()
	must(t, os.MkdirAll(f.path, 0o755))
	f.make("lb-ready-a")
	f.wantReady(vipOne)
}

// An inotify watch belongs to an inode, not to a path.
func TestReplacedDirectoryIsWatched(t *testing.T) {
	tests := map[string]func(t *testing.T, path string){
		"removed and created": func(t *testing.T, path string) {
			must(t, os.RemoveAll(path))
			must(t, os.Mkdir(path, 0o755))
		},
		"moved away and created": func(t *testing.T, path string) {
			must(t, os.Rename(path, path+".old"))
			must(t, os.Mkdir(path, 0o755))
		},
		"another moved over it": func(t *testing.T, path string) {
			must(t, os.Mkdir(path+".new", 0o755))
			must(t, os.RemoveAll(filepath.Join(path, "lb-ready-a")))
			must(t, syscall.Rename(path+".new", path)) // os.Rename refuses
		},
		"exchanged": func(t *testing.T, path string) {
			must(t, os.Mkdir(path+".new", 0o755))
			must(t, unix.Renameat2(unix.AT_FDCWD, path+".new", unix.AT_FDCWD, path, unix.RENAME_EXCHANGE))
		},
		"moved away and back": func(t *testing.T, path string) {
			must(t, os.Rename(path, path+".old"))
			must(t, os.Remove(filepath.Join(path+".old", "lb-ready-a")))
			must(t, os.Rename(path+".old", path))
		},
	}
	for name, replace := range tests {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "d")
			must(t, os.Mkdir(path, 0o755))
			f := runReader(t, path, Options{}, nil)
			for range 3 {
				f.make("lb-ready-a")
				f.wantReady(vipOne)
				replace(t, path)
				f.wantReady()
				_ = os.RemoveAll(path + ".old")
				_ = os.RemoveAll(path + ".new")
			}
			f.make("lb-ready-b")
			f.wantReady(vipTwo, vipWide)
		})
	}
}

// The directory is a symlink that is replaced, or a volume that kubelet updates: its files are
// symlinks through ..data, which kubelet replaces by a rename.
func TestSwappedSymlinksAreSeen(t *testing.T) {
	top := t.TempDir()
	for i, file := range []string{"lb-ready-a", "lb-ready-b"} {
		dir := filepath.Join(top, fmt.Sprint(i))
		must(t, os.Mkdir(dir, 0o755))
		touchFile(t, filepath.Join(dir, file))
	}
	path := filepath.Join(top, "d")
	swap := func(i int, link string) {
		t.Helper()
		must(t, os.Symlink(filepath.Join(top, fmt.Sprint(i)), link+".new"))
		must(t, os.Rename(link+".new", link))
	}
	swap(0, path)
	f := runReader(t, path, Options{}, nil)
	for range 3 {
		f.wantReady(vipOne)
		swap(1, path)
		f.wantReady(vipTwo, vipWide)
		swap(0, path)
	}
	f.wantReady(vipOne)
	// The watch follows the new target of the symlink.
	f.make("lb-ready-b")
	f.wantReady(vipOne, vipTwo, vipWide)

	volume := t.TempDir()
	swap(0, filepath.Join(volume, "..data"))
	for _, name := range []string{"lb-ready-a", "lb-ready-b"} {
		must(t, os.Symlink(filepath.Join("..data", name), filepath.Join(volume, name)))
	}
	must(t, os.Remove(filepath.Join(top, "0", "lb-ready-b")))
	f = runReader(t, volume, Options{}, nil)
	f.wantReady(vipOne)
	swap(1, filepath.Join(volume, "..data"))
	f.wantReady(vipTwo, vipWide)
}

func TestPollsWithoutNotifications(t *testing.T) {
	f := runReader(t, t.TempDir(), Options{}, func(d *Reader) {
		d.notifier = func() (*fsnotify.Watcher, error) { return nil, syscall.EMFILE }
		d.rescan = 10 * time.Millisecond
	})
	f.make("lb-ready-a")
	f.wantReady(vipOne)
	f.remove("lb-ready-a")
	f.wantReady()
}

func TestAHungFileSystemIsNoticed(t *testing.T) {
	hang := make(chan struct{})
	var hangs atomic.Bool
	f := runReader(t, t.TempDir(), Options{}, func(d *Reader) {
		d.rescan = 10 * time.Millisecond
		d.beforeScan = func() {
			if hangs.Load() {
				<-hang
			}
		}
	})
	f.make("lb-ready-a")
	f.wantReady(vipOne)
	hangs.Store(true)
	l := f.wantReady()
	if !l.Gone || !strings.Contains(l.Err.Error(), "hangs") {
		t.Errorf("%+v", l)
	}
	// The reader is alive while the file system hangs, so the listing does not age.
	f.wait("renewed", func(m Listing) bool { return m.At.After(l.At) && m.Revision == l.Revision })
	hangs.Store(false)
	close(hang)
	f.wantReady(vipOne)
}

func TestTheEndDoesNotWaitForAHungFileSystem(t *testing.T) {
	hang := make(chan struct{})
	d := NewReader(Options{Path: t.TempDir(), Log: discard})
	entered := make(chan struct{}, 1)
	d.beforeScan = func() { entered <- struct{}{}; <-hang }
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- d.Run(ctx) }()
	<-entered
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	close(hang)
}
