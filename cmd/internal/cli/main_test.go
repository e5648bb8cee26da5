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

func TestStopDuringStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		stops, release := make(chan struct{}, 1), make(chan struct{})
		stops <- struct{}{}
		if _, err := Start(stops, func() (int, error) { <-release; return 1, nil }); !errors.Is(err, errStopped) {
			t.Errorf("got %v at a stop", err)
		}
		close(release)
		refused := errors.New("refused")
		if n, err := Start(stops, func() (int, error) { return 2, refused }); n != 2 || !errors.Is(err, refused) {
			t.Errorf("got %d, %v without a stop", n, err)
		}
	})
}
