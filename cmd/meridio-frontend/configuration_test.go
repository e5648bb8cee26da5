package main

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/test/clitest"
)

func TestConfigurationDocument(t *testing.T) {
	clitest.Texts(t, "meridio-frontend", false, parser(t), cli.Variables(program(), parser(t)))
	clitest.GeneratedSection(t, "../../docs/meridio.md", "meridio", meridioTable(t))
}

// meridioTable returns the table of Meridio's variables. Converting a number and a word shows the
// effect of each conversion.
func meridioTable(t *testing.T) string {
	notes := map[[2]string]string{
		{"0.0.0.0:3", "0.0.0.0:TRACE"}: "a port, at every address",
		{"3", "TRACE"}:                 "",
		{"3s", "TRACE"}:                "whole seconds, or a duration with its unit",
		{"info", "debug"}:              "in upper or lower case; `TRACE` is `debug`, and an unknown level is `info`",
	}
	var b strings.Builder
	b.WriteString("| Meridio's variable | vipgate's | Values, if they differ |\n|---|---|---|\n")
	for _, a := range aliases {
		sample := [2]string{"3", "TRACE"}
		if a.Convert != nil {
			sample = [2]string{a.Convert("3"), a.Convert("TRACE")}
		}
		note, ok := notes[sample]
		if !ok {
			t.Fatalf("the document does not describe the conversion of %s", a.Names)
		}
		fmt.Fprintf(&b, "| `%s` | `%s` | %s |\n", strings.Join(a.Names, "`, `"), a.Variable, note)
	}
	for _, n := range withoutEffect {
		fmt.Fprintf(&b, "| `%s` | | no effect: %s |\n", strings.Join(n.names, "`, `"), n.why)
	}
	b.WriteString("\n| vipgate's variable | default in Meridio's pod |\n|---|---|\n")
	for _, f := range parser(t).Model.Children[0].Flags {
		if slices.Contains(podDefaults, f.Envs[0]) {
			fmt.Fprintf(&b, "| `%s` | `%s` |\n", f.Envs[0], f.Default)
		}
	}
	return b.String()
}

// podDefaults lists the variables whose defaults belong to Meridio's pod.
var podDefaults = []string{
	"VIPGATE_ADMIN_SOCKET", "VIPGATE_BIRD_LOG_FILE", "VIPGATE_BIRD_LOG_FILE_SIZE", "VIPGATE_HEALTH_SOCKET",
	"VIPGATE_IDENTITY_CACHE", "VIPGATE_METRICS_ADDRESS",
}
