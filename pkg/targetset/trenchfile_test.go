package targetset

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/trench"
)

// fileRig is the source of a trench file with the stream "s", whose drain time is 10 s.
type fileRig struct {
	t    *testing.T
	file *TrenchFile
	now  time.Time
}

func newFileRig(t *testing.T, onGone SourceGonePolicy) *fileRig {
	return &fileRig{t: t, file: NewTrenchFile(onGone), now: time.Now()}
}

func fileTarget(name string, ips ...string) trench.Target {
	t := trench.Target{Name: name}
	for _, ip := range ips {
		t.IPs = append(t.IPs, netip.MustParseAddr(ip))
	}
	return t
}

func (r *fileRig) configure(targets ...trench.Target) {
	r.file.Configure(r.now, []trench.Stream{{Name: "s", DrainTime: 10 * time.Second, Targets: targets}})
}

// want takes what changed in the stream, written as "name addresses".
func (r *fileRig) want(want ...string) {
	r.t.Helper()
	offers, ok := r.file.Take()["s"]
	if !ok {
		r.t.Fatal("nothing changed")
	}
	var got []string
	for _, o := range offers {
		s := o.Name + " " + join(o.IPs)
		if o.Lifecycle != Active {
			s += fmt.Sprintf(" %v left: %s", o.DrainEnd.Sub(r.now), o.Cause)
		}
		got = append(got, s)
	}
	if !slices.Equal(got, want) {
		r.t.Fatalf("offered %q, want %q", got, want)
	}
}

func (r *fileRig) wantNothing() {
	r.t.Helper()
	if changed := r.file.Take(); len(changed) != 0 {
		r.t.Fatalf("changed %v", changed)
	}
}

const (
	left = "no longer in the trench file"
	term = "marked as terminating in the trench file"
)

func TestRemovedFileTargetDrains(t *testing.T) {
	r := newFileRig(t, Hold)
	r.configure(fileTarget("a", "172.16.0.1"), fileTarget("b", "172.16.0.2"))
	r.want("a 172.16.0.1", "b 172.16.0.2")
	r.wantNothing()
	r.configure(fileTarget("b", "172.16.0.2"))
	r.want("b 172.16.0.2", "a 172.16.0.1 10s left: "+left)
	r.now = r.now.Add(4 * time.Second)
	r.configure(fileTarget("b", "172.16.0.2")) // another reading starts nothing again
	r.want("b 172.16.0.2", "a 172.16.0.1 6s left: "+left)
	r.now = r.now.Add(6 * time.Second)
	r.wantNothing() // the set ends the drain; the next reading removes the offer
	r.configure(fileTarget("b", "172.16.0.2"))
	r.want("b 172.16.0.2")
}

func TestReturnedFileTargetNoLongerDrains(t *testing.T) {
	r := newFileRig(t, Hold)
	r.configure(fileTarget("a", "172.16.0.1"))
	r.want("a 172.16.0.1")
	r.configure()
	r.want("a 172.16.0.1 10s left: " + left)
	r.configure(fileTarget("a", "172.16.0.1"))
	r.want("a 172.16.0.1")
}

func TestOldAddressOfAFileTargetDrains(t *testing.T) {
	r := newFileRig(t, Hold)
	r.configure(fileTarget("a", "172.16.0.1"))
	r.want("a 172.16.0.1")
	r.configure(fileTarget("a", "172.16.0.9"))
	r.want("a 172.16.0.9", "a 172.16.0.1 10s left: "+left)
}

func TestTerminatingFileTargetDrainsOnce(t *testing.T) {
	r := newFileRig(t, Hold)
	a := fileTarget("a", "172.16.0.1")
	r.configure(a)
	r.want("a 172.16.0.1")
	a.Terminating = true
	r.configure(a)
	r.want("a 172.16.0.1 10s left: " + term)
	r.now = r.now.Add(10 * time.Second)
	r.wantNothing()
	r.configure(a) // it is still in the file, and still over
	r.want("a 172.16.0.1 0s left: " + term)
	a.Terminating = false
	r.configure(a)
	r.want("a 172.16.0.1")
}

func TestRereadKeepsDrainOfOldAddress(t *testing.T) {
	r := newFileRig(t, Hold)
	r.configure(fileTarget("a", "172.16.0.1"))
	a := fileTarget("a", "172.16.0.9")
	a.Terminating = true
	r.configure(a)
	r.want("a 172.16.0.9 10s left: "+term, "a 172.16.0.1 10s left: "+left)
	r.now = r.now.Add(4 * time.Second)
	r.configure(a)
	r.want("a 172.16.0.9 6s left: "+term, "a 172.16.0.1 6s left: "+left)
}

func TestTerminatingTargetDrainsAfterRemoval(t *testing.T) {
	r := newFileRig(t, Hold)
	a := fileTarget("a", "172.16.0.1")
	a.Terminating = true
	r.configure(a)
	r.want("a 172.16.0.1 10s left: " + term)
	r.now = r.now.Add(4 * time.Second)
	// It is no longer announced: it leaves, so that another source may still have it.
	r.configure(fileTarget("a", "172.16.0.9"))
	r.want("a 172.16.0.9", "a 172.16.0.1 6s left: "+left)
	if old := r.file.lists["s"][1]; old.Lifecycle != Leaving {
		t.Errorf("what is no longer in the file is offered as %+v", old)
	}
}

func TestUnchangedStreamsCostNothing(t *testing.T) {
	f := NewTrenchFile(Hold)
	var streams []trench.Stream
	for i := range 1000 {
		streams = append(streams, trench.Stream{
			Name: fmt.Sprint(i), DrainTime: time.Minute,
			Targets: []trench.Target{fileTarget("a", "172.16.0.1")},
		})
	}
	now := time.Now()
	f.Configure(now, streams)
	f.Take()
	if n := testing.AllocsPerRun(10, func() { f.Take() }); n > 10 {
		t.Errorf("a look at 1000 streams of which none changed makes %v allocations", n)
	}
}

func TestMissingFile(t *testing.T) {
	for onGone, want := range map[SourceGonePolicy][]string{
		Hold:  nil,
		Drain: {"a 172.16.0.1 10s left: the trench file is gone"},
		Drop:  {},
	} {
		t.Run(string(onGone), func(t *testing.T) {
			r := newFileRig(t, onGone)
			r.configure(fileTarget("a", "172.16.0.1"))
			r.want("a 172.16.0.1")
			r.file.Lose(r.now, fmt.Errorf("open trench.yaml: %w", fs.ErrNotExist))
			if want == nil {
				r.wantNothing()
			} else {
				r.want(want...)
			}
			r.file.Lose(r.now, errors.New("still gone"))
			r.wantNothing()
			if s := r.file.State(); s.Live || s.Detail != "still gone" || s.OnGone != onGone {
				t.Errorf("state %+v", s)
			}
			r.configure(fileTarget("a", "172.16.0.1"))
			r.want("a 172.16.0.1")
			if s := r.file.State(); !s.Live || s.Detail != "" {
				t.Errorf("state %+v", s)
			}
		})
	}
}

func TestRemovedFileStream(t *testing.T) {
	r := newFileRig(t, Hold)
	r.configure(fileTarget("a", "172.16.0.1"))
	r.want("a 172.16.0.1")
	r.file.Configure(r.now, nil)
	r.want()
	r.wantNothing()
}
