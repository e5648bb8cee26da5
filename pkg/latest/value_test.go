package latest

import (
	"testing"
	"testing/synctest"
)

func TestSlowReaderGetsNewestValue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v := New(0)
		seen := make(chan int)
		go func() {
			for {
				x, changed := v.Get()
				if x == 1000 {
					seen <- x
					return
				}
				<-changed
			}
		}()
		for i := 1; i <= 1000; i++ {
			v.Set(i)
		}
		if got := <-seen; got != 1000 {
			t.Fatalf("got %d", got)
		}
	})
}
