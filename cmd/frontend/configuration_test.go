package main

import (
	"strings"
	"testing"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/cmd/internal/frontendcmd"
	"github.com/vipgate/vipgate/test/clitest"
)

func TestConfigurationDocument(t *testing.T) {
	if err := clitest.Flags("../../docs/configuration.md", "frontend", parser(t), *update); err != nil {
		t.Error(err)
	}
	variables := strings.Join(cli.Variables(frontendcmd.Program(), parser(t)), "\n")
	if err := clitest.Section("../internal/cli/variables.txt", "frontend", variables, *update); err != nil {
		t.Error(err)
	}
}
