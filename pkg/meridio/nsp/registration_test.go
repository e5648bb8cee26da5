package nsp

import (
	"testing"
	"time"

	nspv1 "github.com/vipgate/vipgate/pkg/api/nsp/v1"
	"github.com/vipgate/vipgate/test/await"
)

// registration runs a registration of a frontend that is up or down.
func (f *fixture) registration(up bool) (r *Registration, c *connectivity, end func()) {
	f.t.Helper()
	c = &connectivity{}
	c.Set(up)
	r = NewRegistration(f.o, c.up)
	return r, c, f.run(r)
}

func (f *fixture) wantTargets(n int) {
	f.t.Helper()
	await.True(f.t, "targets", func() bool { return len(f.Targets()) == n })
}

func TestRegistration(t *testing.T) {
	f := newFixture(t)
	r, c, end := f.registration(true)
	f.wantTargets(1)
	x := f.Targets()[0]
	if len(x.GetIps()) != 1 || x.GetIps()[0] != "pod-1" || x.GetType() != nspv1.Target_FRONTEND ||
		x.GetContext()["identifier"] != "pod-1" {
		t.Errorf("registered is %v", x)
	}
	await.True(t, "the state", func() bool { return r.State().Load().Registered })
	await.True(t, "an entry that is enabled, before its first refresh", func() bool {
		targets := f.Targets()
		return len(targets) == 1 && targets[0].GetStatus() == nspv1.Target_ENABLED
	})
	c.Set(false)
	f.wantTargets(0)
	await.True(t, "the state", func() bool { return !r.State().Load().Registered })
	c.Set(true)
	// The NSP stores the entry before the frontend receives the answer.
	await.True(t, "the state", func() bool { return r.State().Load().Registered })
	f.wantTargets(1)
	end()
	f.wantTargets(0)
	if n := f.log.count(`msg="registered at the NSP"`); n != 2 {
		t.Errorf("the registration was logged %d times, want 2", n)
	}
}

func TestRefresh(t *testing.T) {
	f := newFixture(t)
	f.o.EntryTimeout = 10 * time.Millisecond
	_, c, _ := f.registration(true)
	await.True(t, "refreshes", func() bool { return len(f.Requests("Register")) >= 5 })
	f.Forget() // an NSP that lost its database
	f.wantTargets(1)
	if n := f.log.count(`msg="registered at the NSP"`); n != 1 {
		t.Errorf("refreshes were logged: %d lines", n)
	}
	c.Set(false)
	f.wantTargets(0)
	before := len(f.Requests("Register"))
	c.Set(false) // wakes the registration
	await.True(t, "an end of the calls", func() bool { return len(f.Requests("Unregister")) == 1 })
	if n := len(f.Requests("Register")); n != before {
		t.Errorf("%d refreshes without connectivity", n-before)
	}
}

// The entry of a killed frontend is removed if the frontend has no connectivity.
func TestEarlierEntry(t *testing.T) {
	f := newFixture(t)
	_, _, end := f.registration(true)
	f.wantTargets(1)
	f.stop()
	end() // cannot unregister
	f.start()
	f.wantTargets(1)
	f.registration(false)
	f.wantTargets(0)
}

// The stop removes the entry of a frontend that lost its connectivity while the NSP was
// unreachable.
func TestEntryOfFailedCall(t *testing.T) {
	f := newFixture(t)
	f.o.MaxBackoff = time.Hour // no retry between the return of the NSP and the stop
	r, c, end := f.registration(true)
	f.wantTargets(1)
	f.stop()
	c.Set(false)
	await.True(t, "failures", func() bool { return r.State().Load().Failures >= 5 })
	f.start()
	f.wantTargets(1)
	before := len(f.Requests("Unregister"))
	end()
	if n := len(f.Requests("Unregister")); n != before+1 {
		t.Errorf("%d calls to unregister at the stop", n-before)
	}
	f.wantTargets(0)
	if r.State().Load().Registered {
		t.Error("the state is registered")
	}
}

// An NSP that applies a call late, even if its client canceled it, keeps no entry of a frontend
// that lost its connectivity or ended.
func TestLateRegistration(t *testing.T) {
	for name, lose := range map[string]func(c *connectivity, end func()){
		"no connectivity": func(c *connectivity, _ func()) { c.Set(false) },
		"stop":            func(_ *connectivity, end func()) { end() },
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			late := make(chan struct{})
			f.HoldRegister(late)
			_, c, end := f.registration(true)
			await.True(t, "a call", func() bool { return len(f.Requests("Register")) == 1 })
			time.AfterFunc(answerTimeout/5, func() { close(late) })
			lose(c, end)
			await.True(t, "the opposite call", func() bool { return len(f.Requests("Unregister")) == 1 })
			select {
			case <-late:
			default:
				t.Error("the call that unregisters overtook the other one")
			}
			f.wantTargets(0)
		})
	}
}

// A hanging NSP delays neither the next call nor the stop.
func TestHangingRegistry(t *testing.T) {
	f := newFixture(t)
	f.Hang(true)
	r, c, end := f.registration(true)
	await.True(t, "a call", func() bool { return len(f.Requests("Register")) == 1 })
	begun := time.Now()
	c.Set(false)
	await.True(t, "the opposite call", func() bool { return len(f.Requests("Unregister")) == 1 })
	end()
	if d := time.Since(begun); d > CallTimeout {
		t.Errorf("the loss and the stop took %v, want less than the timeout of a call", d)
	}
	if s := r.State().Load(); s.Registered {
		t.Errorf("the state is %+v", s)
	}
}

// No entry remains if the connectivity returns briefly and cancels the call that unregisters.
func TestFlappingConnectivity(t *testing.T) {
	f := newFixture(t)
	// Run and callWhile call up alternately.
	answers := []bool{true, true, false, true, false}
	once, never := make(chan struct{}), make(chan struct{})
	close(once)
	asked := 0
	f.run(NewRegistration(f.o, func() (bool, <-chan struct{}) {
		asked++
		if asked == 1 {
			return true, once
		}
		return answers[min(asked, len(answers))-1], never
	}))
	await.True(t, "a call to unregister", func() bool { return len(f.Requests("Unregister")) >= 1 })
	f.wantTargets(0)
}

func TestAbsentRegistry(t *testing.T) {
	f := newFixture(t)
	f.stop()
	r, _, _ := f.registration(true)
	await.True(t, "failures", func() bool { s := r.State().Load(); return s.Failures >= 3 && s.Err != nil })
	if n := f.log.count("registration at the NSP failed"); n != 1 {
		t.Errorf("the failure was logged %d times, want once", n)
	}
	f.start()
	f.wantTargets(1)
	await.True(t, "the state", func() bool { s := r.State().Load(); return s.Registered && s.Err == nil })
}
