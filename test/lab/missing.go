package lab

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
)

// Needs says what this machine lacks for a laboratory, an error for each.
func Missing() []error {
	var errs []error
	for _, program := range []string{BIRD(), filepath.Join(filepath.Dir(BIRD()), "birdc")} {
		if _, err := os.Stat(program); err != nil {
			errs = append(errs, errors.New("missing: "+program+" (Debian: apt-get install bird2)"))
		}
	}
	if _, err := exec.LookPath("ip"); err != nil {
		errs = append(errs, errors.New("missing: ip (Debian: apt-get install iproute2)"))
	}
	return errs
}
