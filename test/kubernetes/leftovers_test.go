package kubernetes

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
)

// gone is a process ID above the largest pid_max.
const gone = "4194305"

// TestAPIServerLeftoversAreRemoved checks that the process and the folder of a killed run are
// removed, and that the process and folder of the current run are kept.
func TestAPIServerLeftoversAreRemoved(t *testing.T) {
	own := &Cluster{t: t, bound: -1}
	t.Cleanup(func() { harness.Check(t, own.end()) })
	if err := own.createFolder(); err != nil { // removes leftovers, too
		t.Fatal(err)
	}
	// The folder gets the name of a killed run after its process started: tests of other packages
	// remove leftovers, too.
	started, err := os.MkdirTemp(tempDir, filepath.Base(own.dir)+"-")
	harness.Must(t, err)
	left, err := startProcess(started, "left", "sleep", "600")
	harness.Must(t, err)
	t.Cleanup(func() { harness.Must(t, left.kill()) })
	killed := filepath.Join(tempDir, "vk-"+gone+"-"+strconv.Itoa(os.Getpid()))
	harness.Must(t, os.Rename(started, killed))
	own.etcd, err = startProcess(own.dir, "own", "sleep", "600")
	harness.Must(t, err)
	harness.Must(t, removeLeftovers())
	await.Receive(t, "the end of a process of the killed run", left.done)
	if _, err := os.Stat(killed); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("folder of the killed run: %v, want it removed", err)
	}
	select {
	case <-own.etcd.done:
		t.Error("a process of this run was killed")
	default:
	}
	if _, err := os.Stat(own.dir); err != nil {
		t.Errorf("folder of this run: %v", err)
	}
}
