package publication

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/vip"
)

// watchDelay is the time until the watch returns a write.
const watchDelay = 50 * time.Millisecond

// world is a fake API server that stores the status of Services. It refuses a write to an older
// version of a Service, and its watch has a delay.
type world struct {
	*api
	input *latest.Value[Input]
	// refuse returns the answer to a write; nil accepts it.
	refuse func(write) error

	mu       sync.Mutex
	services map[string]*corev1.Service
	vips     map[string]vip.VIP // desired
}

func newWorld(services int, address vip.VIP) *world {
	w := &world{
		api: newAPI(), input: latest.New(Input{}), services: map[string]*corev1.Service{}, vips: map[string]vip.VIP{},
	}
	for i := range services {
		w.vips[fmt.Sprintf("web-%03d", i)] = address
	}
	w.answer = func(_ int, x write) error {
		w.mu.Lock()
		defer w.mu.Unlock()
		if x.resource != "services" {
			return nil
		}
		if w.refuse != nil {
			if err := w.refuse(x); err != nil {
				return err
			}
		}
		metadata, s := x.body["metadata"].(map[string]any), w.services[x.name].DeepCopy()
		if metadata["resourceVersion"] != s.ResourceVersion {
			return apierrors.NewConflict(schema.GroupResource{Resource: "services"}, x.name, errors.New("newer"))
		}
		status, err := json.Marshal(x.body["status"])
		if err == nil {
			err = json.Unmarshal(status, &s.Status)
		}
		s.ResourceVersion = strconv.Itoa(w.version)
		w.services[x.name] = s
		time.AfterFunc(watchDelay, w.notify)
		return err
	}
	w.notify()
	return w
}

// set changes the desired VIP of a Service, which is created if it does not exist.
func (w *world) set(name string, address vip.VIP) {
	w.mu.Lock()
	w.vips[name] = address
	w.mu.Unlock()
	w.notify()
}

// setAll changes the desired VIP of all Services.
func (w *world) setAll(address vip.VIP) {
	w.mu.Lock()
	for name := range w.vips {
		w.vips[name] = address
	}
	w.mu.Unlock()
	w.notify()
}

// notify passes the newest objects to the leader.
func (w *world) notify() {
	w.mu.Lock()
	defer w.mu.Unlock()
	in := input(trench(), nil)
	in.Objects.Services = nil
	for _, name := range slices.Sorted(maps.Keys(w.vips)) {
		if w.services[name] == nil {
			s := service()
			s.Name, s.UID = name, types.UID(name)
			w.services[name] = s
		}
		v := accepted(w.vips[name])
		v.Object.Name = name
		in.Objects.Services = append(in.Objects.Services, w.services[name])
		in.Result.Services = append(in.Result.Services, v)
	}
	w.input.Set(in)
}

// published returns the number of Services with an address.
func (w *world) published(address vip.VIP) (n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, s := range w.services {
		if addresses(s.Status.LoadBalancer.Ingress) == address.Prefix().Addr().String() {
			n++
		}
	}
	return n
}

// writesOf returns the writes of a Service.
func (w *world) writesOf(name string) (found []write) {
	for _, x := range w.of("services") {
		if x.name == name {
			found = append(found, x)
		}
	}
	return found
}

// lead runs a leader until the returned function is called.
func (w *world) lead(t *testing.T, l *leader) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		l.run(ctx, w.input)
	}()
	return func() {
		cancel()
		<-ended
	}
}

// While the API server is unreachable, only a few writes are tried, with back-off. Afterwards all
// objects are written.
func TestAbsentAPIServerIsAskedSeldom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(100, vip4)
		w.refuse = func(write) error { return errNetwork }
		l := w.leader()
		var last error
		l.failed = func(err error) { last = err }
		defer w.lead(t, l)()
		time.Sleep(5 * time.Second)
		synctest.Wait()
		// All writers attempt a write at 0, 0.2, 0.6, 1.4 and 3 s.
		if n := len(w.of("services")); n < 3 || n > 6*writers || last == nil {
			t.Errorf("%d writes in 5 s, error %v", n, last)
		}
		w.mu.Lock()
		w.refuse = nil
		w.mu.Unlock()
		time.Sleep(20 * time.Second)
		synctest.Wait()
		if n := w.published(vip4); n != 100 || last != nil {
			t.Errorf("after the return %d Services have their address, error %v", n, last)
		}
	})
}

// While many writes are queued, a new Service takes precedence. Only the newest status of each
// object is written.
func TestNewestStatusWins(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const many = 400
		w := newWorld(many, vip4)
		defer w.lead(t, w.leader())()
		time.Sleep(20 * time.Second)
		if n := w.published(vip4); n != many {
			t.Fatalf("%d Services have their address", n)
		}
		w.setAll(vip6)
		time.Sleep(2 * time.Second)
		outdated := w.published(vip6)
		if outdated < 20 || outdated > many*3/4 {
			t.Fatalf("%d Services have the second address", outdated)
		}
		w.setAll(vip4)
		w.set("new", vip4)
		since := time.Now()
		time.Sleep(30 * time.Second)
		if n := w.published(vip4); n != many+1 {
			t.Errorf("%d Services have the last address", n)
		}
		if d := w.writesOf("new")[0].at.Sub(since); d > 500*time.Millisecond {
			t.Errorf("the new Service waited for %v", d)
		}
		writes := 0
		for _, x := range w.of("services") {
			if x.at.After(since) && strings.Contains(fmt.Sprint(x.body["status"]), vip6.Prefix().Addr().String()) {
				writes++
			}
		}
		if writes > writers {
			t.Errorf("%d writes of the outdated address", writes)
		}
	})
}

// A write without an answer does not delay the remaining writes.
func TestHungWriteDelaysNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(50, vip4)
		release := make(chan struct{})
		w.delay = func(name string) {
			if name == "web-000" {
				<-release
			}
		}
		stop := w.lead(t, w.leader())
		time.Sleep(5 * time.Second)
		w.set("new", vip4)
		time.Sleep(time.Second)
		if n := w.published(vip4); n != 50 {
			t.Errorf("%d Services have their address, want all 51 but one", n)
		}
		close(release)
		time.Sleep(time.Second)
		if n := w.published(vip4); n != 51 {
			t.Errorf("%d Services have their address", n)
		}
		stop()
	})
}

// An error is reported during the back-off of its object, while other objects are written.
func TestFailureHoldsDuringBackOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(3, vip4)
		w.refuse = func(x write) error {
			status, _ := x.body["status"].(map[string]any)
			if x.name == "web-001" && strings.Contains(text([]any{status["loadBalancer"]}), vip4.Prefix().Addr().String()) {
				return apierrors.NewInvalid(schema.GroupKind{Kind: "Service"}, x.name, nil)
			}
			return nil
		}
		l := w.leader()
		var mu sync.Mutex
		var errs []error
		l.failed = func(err error) {
			mu.Lock()
			defer mu.Unlock()
			errs = append(errs, err)
		}
		defer w.lead(t, l)()
		for i := range 60 {
			time.Sleep(time.Second)
			w.set("web-000", []vip.VIP{vip4, vip6}[i%2])
		}
		attempts := len(w.writesOf("web-001"))
		mu.Lock()
		if len(errs) == 0 || slices.Contains(errs, nil) {
			t.Errorf("reported %v while Service web-001 is refused", errs)
		}
		mu.Unlock()
		if attempts < 6 || attempts > 10 {
			t.Errorf("%d attempts in a minute", attempts)
		}
		// A different desired status is written without delay.
		w.set("web-001", vip6)
		since := time.Now()
		time.Sleep(time.Second)
		writes := w.writesOf("web-001")
		if last := writes[len(writes)-1]; len(writes) != attempts+1 || last.at.Sub(since) > 200*time.Millisecond {
			t.Errorf("%d attempts more, the last one after %v", len(writes)-attempts, last.at.Sub(since))
		}
		mu.Lock()
		defer mu.Unlock()
		if last := errs[len(errs)-1]; last != nil {
			t.Errorf("after the write: %v", last)
		}
	})
}

// The error of an object is cleared when the object is deleted.
func TestFailureOfDeletedObject(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(2, vip4)
		w.refuse = func(x write) error {
			if x.name == "web-001" {
				return errForbidden
			}
			return nil
		}
		l := w.leader()
		var last error
		l.failed = func(err error) { last = err }
		defer w.lead(t, l)()
		time.Sleep(time.Second)
		synctest.Wait()
		if last == nil {
			t.Fatal("no error")
		}
		w.mu.Lock()
		delete(w.vips, "web-001")
		w.mu.Unlock()
		w.notify()
		time.Sleep(time.Second)
		synctest.Wait()
		if last != nil {
			t.Errorf("after the deletion: %v", last)
		}
	})
}

// Writes are delayed while the Lease is uncertain.
func TestDoubtfulLeaseHoldsWrites(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(50, vip4)
		l := w.leader()
		doubt := time.Now().Add(3 * time.Second)
		l.holds = func() bool { return time.Now().After(doubt) }
		defer w.lead(t, l)()
		time.Sleep(2900 * time.Millisecond)
		if n := len(w.of("services")) + len(w.of("trenches")); n > 0 {
			t.Errorf("%d writes", n)
		}
		time.Sleep(5 * time.Second)
		if n := w.published(vip4); n != 50 {
			t.Errorf("%d Services have their address", n)
		}
	})
}

// New objects are first, known Ingresses last.
func TestOrderOfTheQueue(t *testing.T) {
	l := newAPI().leader()
	q := &order{class: l.class}
	for _, x := range []struct {
		id      types.UID
		kind    schema.GroupVersionResource
		settled bool
	}{
		{"known Ingress", ingresses, true},
		{"new Ingress", ingresses, false},
		{"known Service", services, true},
		{"another known Service", services, true},
		{"new Service", services, false},
	} {
		l.objects[x.id] = &object{wanted: wanted{resource: x.kind}, settled: x.settled}
		q.Push(x.id)
	}
	var got []string
	for q.Len() > 0 {
		got = append(got, string(q.Pop()))
	}
	const want = "new Service, new Ingress, known Service, another known Service, known Ingress"
	if text := strings.Join(got, ", "); text != want {
		t.Errorf("got  %s\nwant %s", text, want)
	}
}
