package healthcheck

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/vipgate/vipgate/pkg/files"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/test/harness"
)

// A file whose stamp is known is not read again, and each other one is.
func TestKnownTLSFilesAreNotRead(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ca.pem")
	config := &tlsConfig{TLSCheck: trench.TLSCheck{On: true, CAFile: path}}
	want := func(known tlsFiles, content string) {
		t.Helper()
		read, err := config.readFiles(known)
		if err != nil || string(read.ca.data) != content {
			t.Errorf("read %q, want %q: %v", read.ca.data, content, err)
		}
		if read.cert.data != nil || read.key.data != nil {
			t.Error("read files that the check does not have")
		}
	}
	harness.Must(t, os.WriteFile(path, []byte("one"), 0o600))
	stamp, err := files.StampOf(path)
	harness.Must(t, err)
	known := tlsFiles{ca: tlsFile{[]byte("known"), stamp}}
	want(tlsFiles{}, "one")
	want(known, "known")
	// A new file may not have another stamp after the next change.
	fresh, err := config.readFiles(tlsFiles{})
	if err != nil || fresh.ca.stamp != (files.Stamp{}) {
		t.Errorf("the stamp of a new file counts: %v", err)
	}
	harness.Must(t, os.Remove(path))
	if _, err := config.readFiles(known); err == nil {
		t.Error("the file is gone")
	}
	harness.Must(t, os.WriteFile(path, []byte("more"), 0o600))
	want(known, "more")
}
