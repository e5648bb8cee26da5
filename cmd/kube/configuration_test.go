package main

import (
	"testing"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/test/clitest"
)

func TestConfigurationDocument(t *testing.T) {
	clitest.Texts(t, "kube", true, parser(t), cli.Variables(program(), parser(t)))
}
