package cluster

import (
	"testing"

	"go.uber.org/goleak"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
)

func TestMain(m *testing.M) {
	// client-go's error handlers sleep until some time after the last error. Bubbles have clocks of
	// their own, which may be years behind.
	utilruntime.ErrorHandlers = nil
	goleak.VerifyTestMain(m)
}
