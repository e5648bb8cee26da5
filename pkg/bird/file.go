package bird

import (
	"bytes"
	"io/fs"
	"os"

	"github.com/vipgate/vipgate/pkg/durable"
)

// ensureFile writes a file unless it holds the content already, so that a restart of BIRD works on
// a full or read-only disk.
func ensureFile(path string, content []byte, mode fs.FileMode) error {
	if b, err := os.ReadFile(path); err == nil && bytes.Equal(b, content) {
		return nil
	}
	return durable.Replace(path, content, mode)
}
