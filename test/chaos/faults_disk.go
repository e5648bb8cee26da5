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

// breakage lists the kinds of invalid trench files.
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
	apply func(fx *fixture, f fault) (func(context.Context) error, error)
}{
	{"reset", func(fx *fixture, _ fault) (func(context.Context) error, error) {
		fx.timeline.set("stream", down)
		fx.proxy.reset()
		fx.timeline.set("stream", healthy)
		return nil, nil
	}},
	{"half-closed toward the frontend", func(fx *fixture, _ fault) (func(context.Context) error, error) {
		fx.timeline.set("stream", down)
		fx.proxy.halfClose(true)
		fx.timeline.set("stream", healthy)
		return nil, nil
	}},
	{"half-closed toward the lb", func(fx *fixture, _ fault) (func(context.Context) error, error) {
		fx.timeline.set("stream", disturbed)
		fx.proxy.halfClose(false)
		fx.timeline.set("stream", healthy)
		return nil, nil
	}},
	{"refused", func(fx *fixture, _ fault) (func(context.Context) error, error) {
		fx.proxy.refuse(true)
		fx.timeline.set("stream", down)
		return func(context.Context) error {
			fx.timeline.set("stream", healthy)
			fx.proxy.refuse(false)
			return nil
		}, nil
	}},
}

// diskKinds returns the faults of files and of the readiness socket.
func diskKinds() []*kind {
	return []*kind{
		simple("trench file bad", 4, ms(100, 2500), quiet, nothing, resTrench).by(corrupt).variants(
			len(breakage), func(arg int) string { return breakage[arg].name },
		),
		simple("trench file rewritten", 2, once, quiet, nothing,
			resTrench).by(func(_ context.Context, fx *fixture, _ fault) (func(context.Context) error, error) {
			return nil, fx.pod.WriteTrench(trenchText())
		}),
		simple("BIRD's folder full", 4, ms(200, 4000), quiet, nothing, resDisk).by(fillDisk),
		simple("readiness socket slow", 3, ms(500, 3000), quiet, nothing,
			resStream).by(func(_ context.Context, fx *fixture, f fault) (func(context.Context) error, error) {
			fx.timeline.set("stream", disturbed)
			fx.proxy.delay(time.Duration(10+f.Salt%240) * time.Millisecond)
			return func(context.Context) error {
				fx.proxy.delay(0)
				fx.timeline.set("stream", healthy)
				return nil
			}, nil
		}),
		simple("readiness socket stalls", 5, ms(1500, 4000), wide, everything, resStream).by(stall),
		simple("readiness socket pauses", 3, ms(50, 400), quiet, nothing, resStream).by(stall),
		simple("readiness socket", 5, ms(0, 1500), wide, everything,
			resStream).by(func(_ context.Context, fx *fixture, f fault) (func(context.Context) error, error) {
			return proxyVariant[f.Arg].apply(fx, f)
		}).variants(len(proxyVariant), func(arg int) string { return proxyVariant[arg].name }),
	}
}

// stall blocks the proxy in both directions without closing connections.
func stall(_ context.Context, fx *fixture, _ fault) (func(context.Context) error, error) {
	fx.proxy.stall(true)
	fx.timeline.set("stream", stopped)
	return func(context.Context) error {
		fx.timeline.set("stream", healthy)
		fx.proxy.stall(false)
		return nil
	}, nil
}

// corrupt installs an invalid trench file. A program that starts now may reject it.
func corrupt(_ context.Context, fx *fixture, f fault) (func(context.Context) error, error) {
	fx.timeline.set("trench", down)
	heal := func(context.Context) error {
		err := fx.pod.WriteTrench(trenchText())
		fx.timeline.set("trench", healthy)
		return err
	}
	if text := breakage[f.Arg].text; text != nil {
		return heal, fx.pod.WriteTrench(text())
	}
	if err := os.Remove(fx.pod.TrenchFile()); err != nil {
		return heal, fmt.Errorf("trench file: %w", err)
	}
	return heal, nil
}

// fillDisk fills the file system of BIRD's configuration.
func fillDisk(_ context.Context, fx *fixture, _ fault) (func(context.Context) error, error) {
	path := fx.birdDir() + "/filler"
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
	fx.timeline.set("disk", down)
	return func(context.Context) error {
		err := os.Remove(path)
		fx.timeline.set("disk", healthy)
		return err
	}, nil
}
