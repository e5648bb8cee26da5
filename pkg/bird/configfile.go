package bird

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"time"

	"github.com/vipgate/vipgate/pkg/durable"
)

// checkTimeout bounds `bird -p`, which takes 10 ms.
const checkTimeout = 10 * time.Second

// configFile is the file of BIRD's configuration.
type configFile struct{ path, executable string }

// staged returns the path of a configuration that is not checked yet.
func (file configFile) staged() string { return file.path + ".new" }

// install checks a configuration with `bird -p` and replaces the file.
func (file configFile) install(ctx context.Context, content []byte) error {
	if err := durable.Replace(file.staged(), content, 0o600); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	check := exec.CommandContext(ctx, file.executable, "-p", "-c", file.staged())
	check.WaitDelay = time.Second // a child process of BIRD may keep the output open
	output, err := check.CombinedOutput()
	if exit, failed := errors.AsType[*exec.ExitError](err); failed && exit.Exited() {
		err = &refusedError{codeConfigFailed, string(bytes.TrimSpace(output))}
	}
	return file.replace(err)
}

// replace installs the staged file, which a restarted BIRD reads, if its check passed.
func (file configFile) replace(checkErr error) error {
	if checkErr != nil {
		checkErr = fmt.Errorf("failed to check BIRD's new configuration: %w", checkErr)
		return errors.Join(checkErr, os.Remove(file.staged()))
	}
	if err := os.Rename(file.staged(), file.path); err != nil {
		return fmt.Errorf("failed to replace BIRD's configuration: %w", err)
	}
	return nil
}
