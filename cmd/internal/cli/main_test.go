package cli

import (
	"errors"
	"os"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

func TestHungRunIsLeftBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		signals, release := make(chan os.Signal, 2), make(chan struct{})
		signals <- syscall.SIGTERM
		begin := time.Now()
		err := runUntil(signals, time.Minute, func(<-chan struct{}) error { <-release; return nil })
		if err == nil || !strings.Contains(err.Error(), "still running 1m0s") || time.Since(begin) != time.Minute {
			t.Errorf("after %v: %v", time.Since(begin), err)
		}
		close(release)
	})
}

// A signal during the start is kept until the program waits for it.
func TestEverySignalReachesRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		signals, failure := make(chan os.Signal, 2), errors.New("failure")
		for range 2 {
			signals <- syscall.SIGTERM
		}
		err := runUntil(signals, time.Minute, func(stops <-chan struct{}) error {
			<-time.After(time.Second)
			for range 2 {
				<-stops
			}
			return failure
		})
		if !errors.Is(err, failure) {
			t.Errorf("got %v", err)
		}
	})
}
