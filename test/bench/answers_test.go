package main

import (
	"context"
	"net"
	"net/http"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/trench"
	trenchfile "github.com/vipgate/vipgate/pkg/trench/file"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// TestAnswersOfApplication changes the answer to health checks: the change counts once, from the
// first answer with the other status.
func TestAnswersOfApplication(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	harness.Must(t, err)
	ctx, cancel := context.WithCancelCause(t.Context())
	a := &application{
		fixture: &fixture{ctx: ctx, fail: cancel, pod: &lab.Pod{}}, changed: make(chan time.Time, 1), healthy: true,
		answered: true,
	}
	done := make(chan struct{})
	go func() { defer close(done); a.serve(l) }()
	t.Cleanup(func() { l.Close(); <-done })

	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	check := func(want int) {
		t.Helper()
		r, err := client.Get("http://" + l.Addr().String())
		harness.Must(t, err)
		r.Body.Close()
		if r.StatusCode != want {
			t.Errorf("status %d, want %d", r.StatusCode, want)
		}
	}
	check(http.StatusOK)
	if len(a.changed) != 0 {
		t.Error("the same answer counts as a change")
	}
	for _, c := range []struct {
		healthy bool
		status  int
	}{{false, http.StatusServiceUnavailable}, {true, http.StatusOK}} {
		began := time.Now()
		turned := make(chan time.Time)
		go func() {
			at, err := a.turn(c.healthy)
			if err != nil {
				t.Error(err)
			}
			turned <- at
		}()
		for {
			a.mu.Lock()
			is := a.healthy
			a.mu.Unlock()
			if is == c.healthy {
				break
			}
		}
		check(c.status)
		at := <-turned
		check(c.status)
		if at.Before(began) || at.After(time.Now()) || len(a.changed) != 0 {
			t.Errorf("changed %v after the call, %d more", at.Sub(began), len(a.changed))
		}
	}
}

func TestHTTPTrench(t *testing.T) {
	for _, n := range []int{1, 10_001} {
		fx := &fixture{vips: numberedVIPs(n, oneFamily), families: oneFamily}
		config, err := trenchfile.Parse("f", []byte(fx.httpTrench()), trench.DefaultDefaults())
		harness.Must(t, err)
		c := config.Streams[0].Check
		if c.HTTP.Path == "" || c.Rise != 1 || c.Fall != 1 || c.Interval != checkInterval(n) || c.Timeout != c.Interval {
			t.Errorf("%d VIPs: check %+v", n, c)
		}
	}
}
