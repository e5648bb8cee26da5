package main

import (
	"testing"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/cmd/internal/frontendcmd"
	"github.com/vipgate/vipgate/test/clitest"
)

func TestConfigurationDocument(t *testing.T) {
	clitest.Texts(t, "frontend", true, parser(t), cli.Variables(frontendcmd.Program(), parser(t)))
}
