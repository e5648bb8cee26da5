package main

import (
	"strings"
	"testing"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/test/clitest"
)

func TestConfigurationDocument(t *testing.T) {
	if err := clitest.Flags("../../docs/configuration.md", "kube", parser(t), *update); err != nil {
		t.Error(err)
	}
	variables := strings.Join(cli.Variables(program(), parser(t)), "\n")
	if err := clitest.Section("../internal/cli/variables.txt", "kube", variables, *update); err != nil {
		t.Error(err)
	}
}
