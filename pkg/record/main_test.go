package record

import (
	"os"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(writerVariable); dir != "" {
		os.Exit(writeForEver(dir))
	}
	goleak.VerifyTestMain(m)
}
