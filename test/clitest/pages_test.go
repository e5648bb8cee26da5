package clitest

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/alecthomas/kong"

	"github.com/vipgate/vipgate/test/harness"
)

// Bash completes commands, commands of commands, and their flags; the manual has all of them.
func TestPages(t *testing.T) {
	var commands struct {
		Run    struct{ Socket string } `cmd:"" help:"Run."`
		Target struct {
			List struct{ Stream string } `cmd:"" help:"It's a list."`
			Add  struct{}                `cmd:""`
		} `cmd:""`
		Secret struct{} `cmd:"" hidden:""`
	}
	k, err := kong.New(&commands, kong.Name("a-b"))
	harness.Must(t, err)
	dir := t.TempDir()
	harness.Must(t, WritePages(dir, "a-b", k))
	for words, want := range map[string]string{
		"":               "run target --help",
		"target ":        "list add",
		"target list --": "--stream",
		"run --so":       "--socket",
	} {
		script := `source "$1"; COMP_WORDS=(a-b "${@:2}"); COMP_CWORD=$(($# - 1)); _a_b; echo "${COMPREPLY[@]}"`
		args := append([]string{"-ec", script, "bash", filepath.Join(dir, "a-b.bash")}, strings.Split(words, " ")...)
		out, err := exec.CommandContext(t.Context(), "bash", args...).CombinedOutput()
		if got := strings.TrimSpace(string(out)); err != nil || got != want {
			t.Errorf("%q: %v, %q, want %q", words, err, got, want)
		}
	}
	harness.WantText(t, manual("a-b", k), ".SS target list\nIt's a list.", `\-\-stream=STRING`)
	harness.WantText(t, fish("a-b", k), `-n '__fish_seen_subcommand_from target' -a list -d 'It\'s a list.'`)
	harness.WantText(t, zsh("a-b", k), `" target list") compadd -- --stream ;;`)
}
