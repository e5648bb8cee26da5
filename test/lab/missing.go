package lab

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
)

// Missing returns an error for each program that this machine lacks for a lab.
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
