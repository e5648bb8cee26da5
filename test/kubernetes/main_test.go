package kubernetes_test

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/vipgate/vipgate/test/kubernetes"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(kubernetes.Main(m)) }
