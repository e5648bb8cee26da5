package main

import (
	"testing"

	"github.com/vipgate/vipgate/test/clitest"
)

func TestConfigurationDocument(t *testing.T) {
	if err := clitest.Section("../../docs/configuration.md", "target", clitest.Reference(parser(t)), *update); err != nil {
		t.Error(err)
	}
}
