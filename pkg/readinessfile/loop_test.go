package readinessfile

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// clockwork is a readLoop with a fake clock and a fake file system.
type clockwork struct {
	*readLoop
	t        *testing.T
	now      time.Time
	requests chan scanRequest
	files    map[string]time.Time // mtimes by name
	err      error
}

func newClockwork(t *testing.T, o Options) *clockwork {
	o.Path, o.Log = "/d", discard
	d := NewReader(o)
	d.Configure(someStreams, someVIPs)
	c := &clockwork{t: t, now: time.Now(), requests: make(chan scanRequest, 1), files: map[string]time.Time{}}
	c.readLoop = newReadLoop(d, c.requests, make(chan scanResult))
	return c
}

// pass advances the clock. Scans take no time.
func (c *clockwork) pass(d time.Duration) {
	c.t.Helper()
	end := c.now.Add(d)
	for {
		c.act(c.now)
		select {
		case q := <-c.requests:
			c.onScan(c.now, c.answer(q))
			continue
		default:
		}
		at := c.next()
		if at.After(end) {
			c.now = end
			return
		}
		if at.After(c.now) {
			c.now = at
		}
	}
}

func (c *clockwork) answer(q scanRequest) scanResult {
	s := scanResult{request: q, begun: c.now, err: c.err, files: map[string]foundFile{}}
	for name, mtime := range c.files {
		if _, asked := q.names[name]; q.names != nil && !asked {
			continue
		}
		file, _ := canonical(name)
		s.files[name] = foundFile{file: file, mtime: mtime}
	}
	return s
}

func (c *clockwork) want(vips ...vip.VIP) {
	c.t.Helper()
	if got := readyVIPs(c.value.Load()); !slices.Equal(got, vips) {
		c.t.Fatalf("ready: %v, want %v", got, vips)
	}
}

func (c *clockwork) gone() {
	c.err = fmt.Errorf("/d: %w", fs.ErrNotExist)
	c.pass(rescanTime)
}

func TestOneThatAppearsWaitsForTheOthers(t *testing.T) {
	c := newClockwork(t, Options{OnGone: Drop})
	c.pass(0)
	revision := c.value.Load().Revision
	c.appears(c.now)
	c.files["lb-ready-a"] = c.now
	c.pass(raiseQuiet / 2)
	c.scan = true // a rescan in between raises nothing
	c.pass(0)
	c.want()
	c.appears(c.now)
	c.files["lb-ready-b"] = c.now
	c.pass(raiseQuiet - time.Millisecond)
	c.want()
	c.pass(time.Millisecond)
	c.want(vipOne, vipTwo, vipWide)
	if n := c.value.Load().Revision - revision; n != 1 {
		t.Errorf("%d decisions", n)
	}
}

func TestEndlessNewFilesStillCount(t *testing.T) {
	c := newClockwork(t, Options{OnGone: Drop})
	c.pass(0)
	begin := c.now
	c.files["lb-ready-a"] = c.now
	for c.now.Sub(begin) < maxRaiseWait-time.Millisecond {
		c.appears(c.now)
		c.pass(time.Millisecond)
		c.want()
	}
	c.appears(c.now)
	c.pass(time.Millisecond)
	c.want(vipOne)
}

func TestAFallIsNotHeldUpByWhatAppears(t *testing.T) {
	c := newClockwork(t, Options{OnGone: Drop})
	c.files["lb-ready-b"] = c.now
	c.pass(0)
	c.want(vipTwo, vipWide)
	c.appears(c.now)
	c.files["lb-ready-a"] = c.now
	delete(c.files, "lb-ready-b")
	c.removed = map[string]struct{}{"lb-ready-b": {}}
	c.pass(0)
	c.want()
	c.pass(raiseQuiet)
	c.want(vipOne)
}

// Otherwise every VIP would be not ready for the 10 ms until its own file counts.
func TestTheFirstFileOfAVIPDropsNoOther(t *testing.T) {
	c := newClockwork(t, Options{OnGone: Drop})
	c.files["lb-ready-a"] = c.now
	c.pass(0)
	c.want(vipOne)
	c.files["lb-vip-ready-20.0.0.1"] = c.now
	c.scan = true
	c.pass(scanGap)
	c.files["lb-vip-ready-2000::2"] = c.now
	c.want(vipOne)
	c.pass(raiseQuiet)
	c.want(vipOne, vipTwo)
}

// A file of an address that is no VIP does not make the files of groups void, until it is one.
func TestFileOfAnotherAddress(t *testing.T) {
	c := newClockwork(t, Options{OnGone: Drop})
	c.files["lb-ready-a"], c.files["lb-vip-ready-9.9.9.9"] = c.now, c.now
	c.pass(0)
	c.want(vipOne)
	c.files["lb-vip-ready-9.9.9.8"] = c.now
	c.pass(rescanTime + raiseQuiet)
	c.want(vipOne)
	nine := vip.Require("9.9.9.9/32")
	c.Configure(someStreams, append(slices.Clone(someVIPs), nine))
	c.readLoop.known = c.Reader.known.Load()
	c.evaluate(c.now, false)
	if l := c.value.Load(); !l.PerVIP {
		t.Errorf("files of groups count beside the file of a VIP: %+v", l)
	}
}

func TestGoneDirectory(t *testing.T) {
	const drain = 3 * time.Second
	for _, tt := range []struct {
		name    string
		o       Options
		before  []vip.VIP // immediately
		drains  bool
		after   []vip.VIP // after the drain time
		problem bool
	}{
		{name: "hold", o: Options{OnGone: Hold}, before: []vip.VIP{vipOne}, after: []vip.VIP{vipOne}},
		{name: "drain", o: Options{OnGone: Drain, DrainTime: drain}, before: []vip.VIP{vipOne}, drains: true},
		{name: "drain in no time", o: Options{OnGone: Drain}},
		{name: "drop", o: Options{OnGone: Drop}},
		// MissingReady does not apply to a directory that has existed.
		{name: "drop, although one that never was there means ready", o: Options{OnGone: Drop, MissingReady: true}},
		{
			name: "hold files that grow old", o: Options{OnGone: Hold, MaxAge: 2 * time.Second}, before: []vip.VIP{vipOne},
			after: []vip.VIP{vipOne},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := newClockwork(t, tt.o)
			c.files["lb-ready-a"] = c.now
			c.pass(0)
			c.want(vipOne)
			c.gone()
			c.want(tt.before...)
			l := c.value.Load()
			if !l.Gone || !errors.Is(l.Err, fs.ErrNotExist) || c.goneSince.IsZero() || l.DrainEnd.IsZero() == tt.drains {
				t.Errorf("%+v", l)
			}
			c.pass(drain)
			c.want(tt.after...)
			if l := c.value.Load(); !l.DrainEnd.IsZero() || c.now.Sub(l.At) > rescanTime {
				t.Errorf("%+v", l)
			}
			c.err = nil
			c.files["lb-ready-a"] = c.now
			c.pass(rescanTime + raiseQuiet)
			c.want(vipOne)
		})
	}
}

func TestDirectoryThatWasNeverThere(t *testing.T) {
	for _, onGone := range []DirectoryGonePolicy{Hold, Drain, Drop} {
		t.Run(string(onGone), func(t *testing.T) {
			c := newClockwork(t, Options{OnGone: onGone, DrainTime: time.Second})
			c.gone()
			c.want()
			c = newClockwork(t, Options{OnGone: onGone, DrainTime: time.Second, MissingReady: true})
			c.gone()
			c.want(someVIPs...)
			c.err = errors.New("input/output error")
			c.pass(rescanTime)
			c.want() // that is not "missing"
			c.err = nil
			c.pass(rescanTime)
			c.want() // a directory without files
		})
	}
}

func TestFilesGrowOld(t *testing.T) {
	const maxAge = 2500 * time.Millisecond
	c := newClockwork(t, Options{OnGone: Drop, MaxAge: maxAge})
	c.files["lb-ready-a"] = c.now.Round(0).Add(-time.Second)
	c.files["lb-ready-b"] = c.now.Round(0).Add(-maxAge)
	c.pass(0)
	c.want(vipOne)
	l := c.value.Load()
	wantProblems(t, l, `"lb-ready-b": was last touched more than 2.5s ago`)
	if _, why := l.Ready(vipTwo, []string{"b"}); !strings.Contains(why, "lb-ready-b young enough") {
		t.Error(why)
	}
	// The file becomes stale exactly at its deadline, not at the next rescan.
	c.pass(maxAge - time.Second - time.Millisecond)
	c.want(vipOne)
	c.pass(time.Millisecond)
	c.want()
	c.files["lb-ready-a"] = c.now.Round(0)
	c.pass(rescanTime + raiseQuiet)
	c.want(vipOne)
	for range 10 { // a live writer
		c.pass(rescanTime)
		c.files["lb-ready-a"] = c.now.Round(0)
		c.want(vipOne)
	}
}

func TestMtimesInTheFutureAgeToo(t *testing.T) {
	const maxAge = 5 * time.Second
	c := newClockwork(t, Options{OnGone: Drop, MaxAge: maxAge})
	c.files["lb-ready-a"] = c.now.Round(0).Add(24 * time.Hour)
	c.files["lb-ready-b"] = c.now.Round(0).Add(futureTolerance / 2)
	c.pass(0)
	c.want(vipOne, vipTwo, vipWide)
	wantProblems(t, c.value.Load(), `"lb-ready-a": its mtime is in the future`)
	c.pass(maxAge)
	c.want()
}

func TestAListingAgesWhileNothingIsSeen(t *testing.T) {
	c := newClockwork(t, Options{OnGone: Drop})
	c.files["lb-ready-a"] = c.now
	c.pass(0)
	c.pass(10 * rescanTime)
	l := c.value.Load()
	if age := c.now.Sub(l.At); age > rescanTime {
		t.Errorf("the listing is %v old although scans go on", age)
	}
	// A hanging file system is detected before the listing is too old.
	c.tickAt = c.now.Add(scanGap)
	c.now = c.tickAt
	c.act(c.now)
	<-c.requests
	for c.busy && !c.hung {
		c.now = c.next()
		c.act(c.now)
	}
	if age := c.now.Sub(l.At); age > MaxListingAge {
		t.Errorf("noticed %v after the last scan", age)
	}
	c.want()
}
