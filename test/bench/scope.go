package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
)

// scope runs packages that are written for tests in a measurement. It implements the methods of
// testing.TB that [kubernetes.Start] uses.
type scope struct {
	testing.TB // nil
	ctx        context.Context
	ends       []func()
	errs       []error
}

// failed is the panic value with which a test helper ends a function of a scope.
type failed struct{ error }

// try calls f and returns the error with which it failed.
func (s *scope) try(f func()) (err error) {
	defer func() {
		switch p := recover().(type) {
		case nil:
		case failed:
			err = p.error
		default:
			panic(p)
		}
	}()
	f()
	return nil
}

// end runs the cleanup functions, last first.
func (s *scope) end() error {
	for len(s.ends) > 0 {
		f := s.ends[len(s.ends)-1]
		s.ends = s.ends[:len(s.ends)-1]
		s.errs = append(s.errs, s.try(f))
	}
	return errors.Join(s.errs...)
}

// TempDir returns a new folder, which end removes.
func (s *scope) TempDir() string {
	dir, err := os.MkdirTemp("", "vipgate-bench-")
	if err != nil {
		s.Fatal(err)
	}
	s.Cleanup(func() { s.errs = append(s.errs, os.RemoveAll(dir)) })
	return dir
}

func (*scope) Helper()                    {}
func (s *scope) Context() context.Context { return s.ctx }
func (s *scope) Cleanup(f func())         { s.ends = append(s.ends, f) }
func (s *scope) Error(args ...any)        { s.errs = append(s.errs, errors.New(fmt.Sprint(args...))) }

func (s *scope) Errorf(format string, a ...any)  { s.errs = append(s.errs, fmt.Errorf(format, a...)) }
func (*scope) Fatal(args ...any)                 { panic(failed{errors.New(fmt.Sprint(args...))}) }
func (*scope) Fatalf(format string, args ...any) { panic(failed{fmt.Errorf(format, args...)}) }
