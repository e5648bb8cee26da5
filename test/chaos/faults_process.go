package main

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// processKinds returns the faults of the pod's processes and of the machine.
func processKinds() []*kind {
	kill := func(name string) func(context.Context, *fixture, fault) (func(context.Context) error, error) {
		return func(_ context.Context, fx *fixture, _ fault) (func(context.Context) error, error) {
			return fx.supervisor(name).kill()
		}
	}
	end := func(names ...string) func(context.Context, *fixture, fault) (func(context.Context) error, error) {
		return func(_ context.Context, fx *fixture, _ fault) (func(context.Context) error, error) {
			var heals []func(context.Context) error
			var errs []error
			for _, name := range names {
				heal, err := fx.supervisor(name).terminate()
				heals, errs = append(heals, heal), append(errs, err)
			}
			return together(heals...), errors.Join(errs...)
		}
	}
	stop := func(name string) func(context.Context, *fixture, fault) (func(context.Context) error, error) {
		return func(_ context.Context, fx *fixture, _ fault) (func(context.Context) error, error) {
			return stopProcess(fx.supervisor(name).pid())
		}
	}
	all := everything
	return []*kind{
		simple("lb kill -9", 4, ms(0, 4000), wide, all, resLB).by(kill("lb")),
		simple("lb SIGTERM", 2, ms(0, 2000), wide, all, resLB).by(end("lb")),
		simple("lb SIGSTOP", 5, ms(1500, 4500), wide, all, resLB).by(stop("lb")),
		simple("lb pause", 3, ms(50, 500), quiet, nothing, resLB).by(stop("lb")),
		simple("frontend kill -9", 4, ms(0, 4000), wide, all, resFrontend).by(kill("frontend")),
		simple("frontend SIGTERM", 2, ms(0, 2000), wide, all, resFrontend).by(end("frontend")),
		simple("frontend SIGSTOP", 4, ms(700, 5500), wide, all, resFrontend).by(stop("frontend")),
		simple("frontend pause", 3, ms(50, 600), quiet, nothing, resFrontend).by(stop("frontend")),
		simple("pod kill -9", 2, ms(0, 1500), wide, all, resLB, resFrontend).by(
			func(_ context.Context, fx *fixture, _ fault) (func(context.Context) error, error) {
				lb, errLB := fx.supervisor("lb").kill()
				frontend, errFrontend := fx.supervisor("frontend").kill()
				return together(lb, frontend), errors.Join(errLB, errFrontend)
			}),
		simple("pod SIGTERM", 2, ms(0, 1500), wide, all, resLB, resFrontend).by(end("lb", "frontend")),
		simple("bird kill -9", 4, once, wide, all, resSpeaker).by(signalBIRD(unix.SIGKILL)),
		simple("bird SIGTERM", 2, once, wide, all, resSpeaker).by(signalBIRD(unix.SIGTERM)),
		simple("bird SIGSTOP", 3, ms(700, 5500), wide, all, resSpeaker).by(stopBIRD),
		simple("bird pause", 3, ms(50, 700), quiet, nothing, resSpeaker).by(stopBIRD),
		simple("cpu starved", 3, ms(500, 2000), quiet, nothing, resCPU).by(starve).variants(3, func(arg int) string {
			return fmt.Sprintf("by %d busy loops", 2+2*arg)
		}),
	}
}

// together returns a function that calls all of heals.
func together(heals ...func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error {
		var errs []error
		for _, heal := range heals {
			if heal != nil {
				errs = append(errs, heal(ctx))
			}
		}
		return errors.Join(errs...)
	}
}

// stopProcess stops a process and returns a function that continues the same process.
func stopProcess(pid int) (func(context.Context) error, error) {
	if pid == 0 {
		return nil, nil // it does not run at present
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("process %d: %w", pid, err)
	}
	resume := func(context.Context) error {
		defer unix.Close(fd)
		return signalFD(fd, unix.SIGCONT)
	}
	return resume, signalFD(fd, unix.SIGSTOP)
}

// signalFD signals a process that may have ended.
func signalFD(fd int, s syscall.Signal) error {
	if err := unix.PidfdSendSignal(fd, s, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("signal %s: %w", s, err)
	}
	return nil
}

// signalBIRD ends the pod's BIRD, which its frontend restarts.
func signalBIRD(s syscall.Signal) func(context.Context, *fixture, fault) (func(context.Context) error, error) {
	return func(_ context.Context, fx *fixture, _ fault) (func(context.Context) error, error) {
		pid := fx.speakerPID()
		if pid == 0 {
			return nil, nil
		}
		if err := unix.Kill(pid, s); err != nil && !errors.Is(err, unix.ESRCH) {
			return nil, fmt.Errorf("signal %s to the pod's BIRD: %w", s, err)
		}
		return nil, nil
	}
}

func stopBIRD(_ context.Context, fx *fixture, _ fault) (func(context.Context) error, error) {
	return stopProcess(fx.speakerPID())
}

// starve keeps the CPUs busy with loops that also end on a timeout, in case no goroutine ends
// them.
func starve(_ context.Context, fx *fixture, f fault) (func(context.Context) error, error) {
	var heals []func(context.Context) error
	for i := range 2 + 2*f.Arg {
		limit := fmt.Sprint((f.Duration + time.Second).Seconds())
		p, err := fx.spawn(fx.Backend, fmt.Sprintf("busy-%d", i), "timeout", limit, "sh", "-c", "while :; do :; done")
		if err != nil {
			return together(heals...), err
		}
		heals = append(heals, func(context.Context) error {
			// timeout forwards the signal to its child.
			if err := p.Signal(unix.SIGTERM); err != nil {
				return err
			}
			<-p.Done()
			return nil
		})
	}
	return together(heals...), nil
}
