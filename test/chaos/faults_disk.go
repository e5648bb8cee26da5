package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// breakage is a way in which a trench file can be bad.
var breakage = []struct {
	name string
	text func() string
}{
	{"no YAML", func() string { return "trench: [\n" }},
	{"an unknown field", func() string { return trenchText() + "surprise: true\n" }},
	{"empty", func() string { return "" }},
	{"cut off", func() string { t := trenchText(); return t[:len(t)*2/3] }},
	{"a bad VIP", func() string { return strings.Replace(trenchText(), "20.0.0.1/32", "0.0.0.0/0", 1) }},
	{"removed", nil},
}

// proxyVariant is a way to disturb the readiness socket.
var proxyVariant = []struct {
	name  string
	apply func(w *world, f fault) (func(context.Context) error, error)
}{
	{"reset", func(w *world, _ fault) (func(context.Context) error, error) {
		w.truth.set("stream", gone)
		w.proxy.reset()
		w.truth.set("stream", sound)
		return nil, nil
	}},
	{"half-closed toward the frontend", func(w *world, _ fault) (func(context.Context) error, error) {
		w.truth.set("stream", gone)
		w.proxy.halfClose(true)
		w.truth.set("stream", sound)
		return nil, nil
	}},
	{"half-closed toward the lb", func(w *world, _ fault) (func(context.Context) error, error) {
		w.truth.set("stream", rough)
		w.proxy.halfClose(false)
		w.truth.set("stream", sound)
		return nil, nil
	}},
	{"refused", func(w *world, _ fault) (func(context.Context) error, error) {
		w.proxy.refuse(true)
		w.truth.set("stream", gone)
		return func(context.Context) error {
			w.truth.set("stream", sound)
			w.proxy.refuse(false)
			return nil
		}, nil
	}},
}

// diskKinds are the faults of files and of the readiness socket.
func diskKinds() []*kind {
	return []*kind{
		simple("trench file bad", 4, ms(100, 2500), quiet, nothing, resTrench).by(spoil).variants(len(breakage), func(arg int) string { return breakage[arg].name }),
		simple("trench file rewritten", 2, once, quiet, nothing, resTrench).by(func(_ context.Context, w *world, _ fault) (func(context.Context) error, error) {
			return nil, w.pod.WriteTrench(trenchText())
		}),
		simple("BIRD's folder full", 4, ms(200, 4000), quiet, nothing, resDisk).by(fillDisk),
		simple("readiness socket slow", 3, ms(500, 3000), quiet, nothing, resStream).by(func(_ context.Context, w *world, f fault) (func(context.Context) error, error) {
			w.truth.set("stream", rough)
			w.proxy.delay(time.Duration(10+f.Salt%240) * time.Millisecond)
			return func(context.Context) error {
				w.proxy.delay(0)
				w.truth.set("stream", sound)
				return nil
			}, nil
		}),
		simple("readiness socket stalls", 5, ms(1500, 4000), wide, everything, resStream).by(stall),
		simple("readiness socket pauses", 3, ms(50, 400), quiet, nothing, resStream).by(stall),
		simple("readiness socket", 5, ms(0, 1500), wide, everything, resStream).by(func(_ context.Context, w *world, f fault) (func(context.Context) error, error) {
			return proxyVariant[f.Arg].apply(w, f)
		}).variants(len(proxyVariant), func(arg int) string { return proxyVariant[arg].name }),
	}
}

// stall lets nothing through, in either direction, and ends nothing.
func stall(_ context.Context, w *world, _ fault) (func(context.Context) error, error) {
	w.proxy.stall(true)
	w.truth.set("stream", frozen)
	return func(context.Context) error {
		w.truth.set("stream", sound)
		w.proxy.stall(false)
		return nil
	}, nil
}

// spoil puts a bad trench file in place. A program that starts now may refuse it.
func spoil(_ context.Context, w *world, f fault) (func(context.Context) error, error) {
	w.truth.set("trench", gone)
	heal := func(context.Context) error {
		err := w.pod.WriteTrench(trenchText())
		w.truth.set("trench", sound)
		return err
	}
	if text := breakage[f.Arg].text; text != nil {
		return heal, w.pod.WriteTrench(text())
	}
	if err := os.Remove(w.pod.TrenchFile()); err != nil {
		return heal, fmt.Errorf("trench file: %w", err)
	}
	return heal, nil
}

// fillDisk fills the file system of BIRD's configuration.
func fillDisk(_ context.Context, w *world, _ fault) (func(context.Context) error, error) {
	path := w.birdDir() + "/filler"
	f, err := os.Create(path)
	if err != nil {
		return nil, fmt.Errorf("fill BIRD's folder: %w", err)
	}
	defer f.Close()
	for _, size := range []int{4096, 1} {
		for err = nil; err == nil; {
			_, err = f.Write(make([]byte, size))
		}
		if !errors.Is(err, unix.ENOSPC) {
			return nil, fmt.Errorf("fill BIRD's folder: %w", err)
		}
	}
	w.truth.set("disk", gone)
	return func(context.Context) error {
		err := os.Remove(path)
		w.truth.set("disk", sound)
		return err
	}, nil
}
