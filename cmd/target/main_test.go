package main

import (
	"testing"

	"github.com/alecthomas/kong"
	"go.uber.org/goleak"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/test/container"
)

func TestMain(m *testing.M) {
	container.Main()
	goleak.VerifyTestMain(m)
}

func parser(t *testing.T) *kong.Kong {
	t.Helper()
	k, err := cli.New(program(), &commandLine{})
	if err != nil {
		t.Fatal(err)
	}
	return k
}
