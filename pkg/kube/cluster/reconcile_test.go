package cluster

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"net"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"

	"github.com/vipgate/vipgate/test/harness"
)

// newIdle returns a Cluster with followers that the test controls.
func newIdle(t *testing.T, o Options) *Cluster {
	t.Helper()
	dial := func(context.Context, string, string) (net.Conn, error) { return nil, errors.New("no network") }
	o.Config, o.Log = &rest.Config{Host: "http://api", Dial: dial}, slog.New(slog.DiscardHandler)
	c, err := New(o)
	harness.Must(t, err)
	return c
}

// idle creates a cache without a reflector. It is synced with the objects unless they are nil.
func (c *Cluster) idle(t *testing.T, k key, objects []any) {
	t.Helper()
	f := c.followers[k]
	if f == nil {
		f = newFollower(k.String(), func() { c.changed(k) }, c.updateState)
		f.cancel = func() {}
		close(f.done)
		c.followers[k] = f
	}
	if objects != nil {
		harness.Must(t, f.store.Replace(objects, ""))
	}
}

func trenchObject(version string, spec map[string]any) *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "vipgate.io/v1alpha1", "kind": "Trench",
		"metadata": map[string]any{"namespace": "ns", "name": "a", "uid": "a", "resourceVersion": version}, "spec": spec,
	}}
}

func inNamespaces(names ...any) map[string]any {
	return map[string]any{"namespaces": names, "attractor": map[string]any{}}
}

func service(namespace, name string) *corev1.Service {
	return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, ResourceVersion: "1"}}
}

// A Trench takes effect once all caches that it needs are synced. Until then, and while it cannot
// be decoded, the caches of the previous Trench stay.
func TestTrenchInForceOnceSynced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newIdle(t, Options{Namespace: "ns", Trench: "a"})
		caches := func(namespace string, objects []any) {
			var none []any
			if objects != nil {
				none = []any{}
			}
			c.idle(t, key{endpointSlices, namespace, ""}, none)
			c.idle(t, key{pods, namespace, ""}, none)
			c.idle(t, key{services, namespace, ""}, objects)
		}
		caches("one", []any{service("one", "x")})
		c.idle(t, c.own(), nil)
		c.idle(t, c.siblings(), nil)
		for _, step := range []struct {
			name    string
			change  func()
			want    string // version of the Trench, and the Services; "" without a snapshot
			changed bool
			stale   string
		}{
			{"nothing synced", func() {}, "", false, ""},
			{"Trench", func() { c.idle(t, c.own(), []any{trenchObject("1", inNamespaces("one"))}) }, "", false, ""},
			{"pods of the trench", func() { c.idle(t, c.siblings(), []any{pod("p", "1")}) }, "1 one/x", true, ""},
			{"no change", func() {}, "1 one/x", false, ""},
			{"caches not synced", func() {
				caches("two", nil)
				c.idle(t, c.own(), []any{trenchObject("2", inNamespaces("two"))})
			}, "1 one/x", false, ""},
			{"change of a cache in force", func() {
				c.idle(t, key{services, "one", ""}, []any{service("one", "x"), service("one", "y")})
			}, "1 one/x one/y", true, ""},
			{"caches synced", func() { caches("two", []any{service("two", "z")}) }, "2 two/z", true, ""},
			{"Trench that cannot be read", func() {
				c.idle(t, c.own(), []any{trenchObject("3", map[string]any{"namespaces": "two"})})
			}, "3 two/z", true, ""},
			{"no Trench", func() {
				c.idle(t, key{services, "ns", ""}, []any{})
				c.idle(t, key{endpointSlices, "ns", ""}, []any{})
				c.idle(t, key{pods, "ns", ""}, []any{})
				c.idle(t, c.own(), []any{})
			}, "none", true, "Trench ns/a: does not exist"},
			{"Trench again", func() {
				caches("two", []any{service("two", "z")})
				c.idle(t, c.own(), []any{trenchObject("4", inNamespaces("two"))})
			}, "4 two/z", true, ""},
		} {
			time.Sleep(time.Second)
			before := time.Now()
			step.change()
			c.reconcile(t.Context())
			changed := len(c.changes) > 0
			if changed {
				<-c.changes
			}
			if stale := c.State().Load().Stale.Cause; stale != step.stale || changed != step.changed {
				t.Errorf("%s: changed %v, stale %q", step.name, changed, stale)
			}
			s, ok := c.Snapshot()
			if !ok {
				if step.want != "" {
					t.Errorf("%s: no snapshot", step.name)
				}
				continue
			}
			got := []string{"none"}
			if s.Trench != nil {
				got[0] = s.Trench.GetResourceVersion()
			}
			for _, x := range s.Services {
				got = append(got, x.Namespace+"/"+x.Name)
			}
			slices.Sort(got[1:])
			if text := strings.Join(got, " "); text != step.want || len(s.Siblings) != 1 || s.Changed.Before(before) {
				t.Errorf("%s: %q since %v, want %q", step.name, text, before.Sub(s.Changed), step.want)
			}
		}
		if _, kept := c.followers[key{services, "one", ""}]; kept {
			t.Error("a cache that is not needed stays")
		}
	})
}

// A namespace or Secret that the API server refuses for a while holds back no other one, and is a
// problem of the Trench until it is readable.
func TestRefusedCaches(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newIdle(t, Options{Namespace: "ns", Trench: "a"})
		spec := inNamespaces("one", "two")
		spec["attractor"] = map[string]any{"gateways": []any{
			map[string]any{"passwordSecret": map[string]any{"name": "gw", "key": "password"}},
		}}
		c.idle(t, c.own(), []any{trenchObject("1", spec)})
		c.idle(t, c.siblings(), []any{})
		c.followers[c.own()].required = true
		refused := []key{{pods, "two", ""}, {services, "two", ""}, {secrets, "ns", "gw"}}
		for _, k := range []key{
			{services, "one", ""}, {endpointSlices, "one", ""}, {pods, "one", ""}, {endpointSlices, "two", ""},
		} {
			c.idle(t, k, []any{})
		}
		for _, k := range refused {
			c.idle(t, k, nil)
		}
		forbidden := apierrors.NewForbidden(podResource, "", errors.New("no"))
		before := "no snapshot"
		for _, step := range []struct {
			name  string
			after time.Duration
			err   error
			keys  []key
			want  string
			stale bool
		}{
			{"first answer", 0, forbidden, refused, "no snapshot", true},
			{"the API server is away", 1, errors.New("timeout"), refused, "no snapshot", true},
			{"first answer after its start", refusedTime, forbidden, refused, "no snapshot", true},
			{"just before the time", refusedTime - 1, forbidden, refused, "no snapshot", true},
			{"Secret and Pods", 1, forbidden, []key{refused[0], refused[2]}, "no snapshot", true},
			{"the last one", 0, forbidden, refused, "ns/gw two ", false},
			{"the API server restarts", time.Second, errors.New("timeout"), refused, "ns/gw two ", false},
			{"Secret watched", time.Second, nil, refused[2:], "ns/gw two ", false},
			{"Secret listed", 0, nil, nil, "two ", false},
			{"Trench refused", 0, forbidden, []key{c.own()}, "two ", true},
			{"Trench refused for long", time.Minute, forbidden, []key{c.own()}, "two ", true},
			{"all readable", 0, nil, append(refused, c.own()), "", false},
			{"away", time.Second, errors.New("timeout"), refused[:1], "", true},
		} {
			time.Sleep(step.after)
			for len(c.changes) > 0 {
				<-c.changes
			}
			if step.name == "Secret listed" {
				c.idle(t, refused[2], []any{})
			}
			if step.name == "all readable" {
				c.idle(t, refused[0], []any{})
				c.idle(t, refused[1], []any{service("two", "x")})
			}
			for _, k := range step.keys {
				c.followers[k].failing(t.Context(), step.err)
			}
			c.reconcile(t.Context())
			got := "no snapshot"
			if snapshot, ok := c.Snapshot(); ok {
				got = ""
				for _, name := range slices.Sorted(maps.Keys(snapshot.Unreadable)) {
					got += name + " "
					if snapshot.Unreadable[name] == "" {
						t.Errorf("%s: no cause of %s", step.name, name)
					}
				}
			}
			stale := !c.State().Load().Stale.Since.IsZero()
			if changed := len(c.changes) > 0; got != step.want || stale != step.stale || changed != (got != before) {
				t.Errorf("%s: %q, stale %v, changed %v", step.name, got, stale, changed)
			}
			before = got
		}
	})
}

// A Trench has caches for the namespaces that it names, and for Secrets in the same namespace.
func TestNeededCaches(t *testing.T) {
	secret := func(x any) map[string]any { return map[string]any{"passwordSecret": x} }
	gateways := func(list ...any) map[string]any {
		return map[string]any{
			"namespaces": []any{"b", "", "a", "b"}, "attractor": map[string]any{"gateways": list},
		}
	}
	of := func(namespaces ...string) (keys []key) {
		for _, kind := range []kind{services, endpointSlices, pods} {
			for _, n := range namespaces {
				keys = append(keys, key{kind, n, ""})
			}
		}
		return keys
	}
	for name, x := range map[string]struct {
		options Options
		trench  *unstructured.Unstructured
		want    []key // nil if the Trench is unreadable
	}{
		"no Trench":     {Options{Namespace: "ns", Trench: "a"}, nil, of("ns")},
		"no namespaces": {Options{Namespace: "ns", Trench: "a"}, trenchObject("1", map[string]any{}), of("ns")},
		"Secrets": {
			Options{Namespace: "ns", Trench: "a"},
			trenchObject("1", gateways(secret(map[string]any{"name": "y"}),
				secret(map[string]any{"name": "x"}), secret(map[string]any{"name": "y"}), secret("z"), "z", map[string]any{})),
			append(of("a", "b"), key{secrets, "ns", "x"}, key{secrets, "ns", "y"}),
		},
		"unreadable": {Options{Namespace: "ns", Trench: "a"}, trenchObject("1", map[string]any{"namespaces": "a"}), nil},
		"Gateway": {
			Options{Namespace: "ns", Gateway: "g", Pod: "p"}, nil, []key{{kind: gatewayRouters, namespace: "ns"}},
		},
	} {
		keys, readable := newIdle(t, x.options).needed(x.trench)
		if readable != (x.want != nil) || !slices.Equal(keys, x.want) {
			t.Errorf("%s: %v, readable %v, want %v", name, keys, readable, x.want)
		}
	}
}
