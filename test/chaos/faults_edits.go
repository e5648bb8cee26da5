package main

import (
	"context"
	"strings"
)

// edits are changes of the trench file that move no traffic: targets, their addresses and the VIPs
// stay.
var edits = []struct {
	name   string
	change func(text string) string
}{
	{"streams renamed", func(text string) string {
		return strings.ReplaceAll(text, "- name: stream-", "- name: renamed-")
	}},
	{"targets renamed", func(text string) string {
		return strings.ReplaceAll(text, "{name: target-", "{name: renamed-")
	}},
	{"streams and targets renamed", func(text string) string {
		return strings.NewReplacer("- name: stream-", "- name: renamed-", "{name: target-", "{name: renamed-").Replace(text)
	}},
}

// editKinds returns edits of the trench file.
func editKinds() []*kind {
	return []*kind{
		simple("trench file edited", 6, ms(0, 3000), quiet, nothing, resTrench).by(edit).variants(
			len(edits), func(arg int) string { return edits[arg].name },
		),
	}
}

// edit changes the trench file, and the heal changes it back.
func edit(_ context.Context, fx *fixture, f fault) (func(context.Context) error, error) {
	heal := func(context.Context) error { return fx.pod.WriteTrench(trenchText()) }
	return heal, fx.pod.WriteTrench(edits[f.Arg].change(trenchText()))
}
