package lab

import (
	"errors"
	"fmt"
	"os"
)

// skippedVariable names the file that collects what was not tested.
const skippedVariable = "VIPGATE_TEST_SKIPPED"

// Skip skips a test because the machine lacks something. `make test` lists at
// its end what was lacking, so that nothing is skipped silently.
func Skip(t interface {
	Helper()
	Name() string
	Skip(args ...any)
	Errorf(format string, args ...any)
}, lacks string,
) {
	t.Helper()
	if path := os.Getenv(skippedVariable); path != "" {
		f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
		if err == nil {
			_, err = fmt.Fprintf(f, "%s: %s\n", t.Name(), lacks)
			err = errors.Join(err, f.Close())
		}
		if err != nil {
			t.Errorf("note that a test is skipped: %v", err)
			return
		}
	}
	t.Skip(lacks)
}
