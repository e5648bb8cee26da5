package kube

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func TestBurstIsCollected(t *testing.T) {
	for _, tt := range []struct {
		name    string
		changes int           // number of changes after the first one
		gap     time.Duration // time between changes
		written time.Duration // time from the last write to the first change; 0 without a write
		want    time.Duration // time until the translation
	}{
		{"one change", 0, 0, 0, settle},
		{"three changes", 2, settle / 2, 0, 2 * settle},
		{"two changes apart", 1, 2 * settle, 0, settle},
		{"a burst without end", 1000, settle / 2, 0, interval},
		{"one change after a write", 0, 0, 40 * time.Millisecond, interval - 40*time.Millisecond},
		{"a burst after a write", 1000, settle / 2, 40 * time.Millisecond, interval},
		{"one change long after a write", 0, 0, time.Second, settle},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := &agent{}
				if tt.written > 0 {
					a.next = time.Now().Add(interval - tt.written)
				}
				changes, done := make(chan struct{}), make(chan struct{})
				var sender sync.WaitGroup
				sender.Go(func() {
					for range tt.changes {
						time.Sleep(tt.gap)
						select {
						case changes <- struct{}{}:
						case <-done:
						}
					}
				})
				begin := time.Now()
				a.collect(t.Context(), changes)
				if d := time.Since(begin); d != tt.want {
					t.Errorf("translated after %v, want %v", d, tt.want)
				}
				close(done)
				sender.Wait()
			})
		})
	}
}
