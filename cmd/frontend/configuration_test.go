package main

import (
	"fmt"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/test/clitest"
)

const document = "../../docs/configuration.md"

func TestConfigurationDocument(t *testing.T) {
	if err := clitest.Section(document, "frontend", clitest.Reference(parser(t)), *update); err != nil {
		t.Error(err)
	}
	if err := clitest.Section(document, "meridio", meridioTable(t), *update); err != nil {
		t.Error(err)
	}
}

// meridioTable is the table of Meridio's variables. What a conversion does shows
// in what it makes of a number and of a word.
func meridioTable(t *testing.T) string {
	notes := map[[2]string]string{
		{"3", "TRACE"}:  "the same values",
		{"3s", "TRACE"}: "whole seconds, or a duration with its unit",
		{"3", "debug"}:  "in upper or lower case; `TRACE` is our `debug`",
	}
	var b strings.Builder
	b.WriteString("| Meridio's variable | Ours | Values |\n|---|---|---|\n")
	for _, a := range aliases {
		var sample [2]string
		for i, s := range []string{"3", "TRACE"} {
			var err error
			if sample[i], err = a.convert(s); err != nil {
				t.Fatal(err)
			}
		}
		note, ok := notes[sample]
		if !ok {
			t.Fatalf("the document has no words for the conversion of %s", a.meridio)
		}
		fmt.Fprintf(&b, "| `%s` | `%s%s` | %s |\n", strings.Join(a.meridio, "`, `"), ourPrefix, a.ours, note)
	}
	return b.String()
}
