package main

import (
	"testing"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/test/clitest"
)

func TestConfigurationDocument(t *testing.T) {
	clitest.Texts(t, "target", true, parser(t), cli.Variables(program(), parser(t)))
}
