package lab

import (
	"errors"
	"fmt"
	"os"
)

// skippedVariable is the environment variable with the path of the file that collects skipped
// tests.
const skippedVariable = "VIPGATE_TEST_SKIPPED"

// Skip skips a test because the machine lacks something. `make test` lists the missing programs
// at its end, so that no test is skipped silently.
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
