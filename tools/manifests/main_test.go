package manifests

import (
	"log/slog"
	"os"
	"testing"
)

// Helm logs each symbolic link of a chart.
func TestMain(m *testing.M) {
	slog.SetDefault(slog.New(slog.DiscardHandler))
	os.Exit(m.Run())
}
