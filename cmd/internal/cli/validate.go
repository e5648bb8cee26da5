package cli

import (
	"context"
	"encoding/json"
	"time"

	"github.com/alecthomas/kong"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/trench/change"
	trenchfile "github.com/vipgate/vipgate/pkg/trench/file"
)

// ValidateFlags are the flags of lb validate and frontend validate in addition to those of run.
type ValidateFlags struct {
	File   string `arg:"" optional:"" help:"Trench file to check, without identity, BIRD and root, instead of --trench-file with every flag."`
	Diff   Diff   `help:"Show what changes: from the configuration of the running process, or from another trench file. Its session restarts take --drain-time each." placeholder:"OLDFILE" env:"-"`
	Output string `short:"o" help:"table or json." enum:"table,json" default:"table"`
}

// Diff is a flag with an optional value: --diff, or --diff=OLDFILE.
type Diff struct {
	On   bool
	File string // empty for the configuration of the running process
}

// IsBool makes the value optional.
func (*Diff) IsBool() bool { return true }

// Decode implements kong.MapperValue.
func (diff *Diff) Decode(ctx *kong.DecodeContext) error {
	diff.On = true
	if ctx.Scan.Peek().Type == kong.FlagValueToken {
		diff.File = ctx.Scan.Pop().String()
	}
	return nil
}

// Change is a valid edit: the JSON document of validate, and of kube translate --against.
type Change struct {
	Valid bool `json:"valid"`
	// Change is nil unless the user asked for it.
	Change *change.Change `json:"change,omitempty"`
	// Held describes the removals that wait for a confirmation; "" for none.
	Held string `json:"held,omitempty"`
	// RestartTime is about how long the restarts of all sessions take.
	RestartTime string `json:"restartTime,omitempty"`
}

// Compare compares the configuration in force with the next one.
func (edit *Change) Compare(old, next *trench.Config) {
	between := change.Between(old, next)
	edit.Change = &between
	// Whether targets pass their checks is unknown here, so assume it.
	_, held := change.Hold(old, next, trench.Held{}, "", func(string, string) bool { return true })
	edit.Held = held.Problem()
}

// Print prints an edit, and returns ExitFailed if a removal would be held. drain is the drain time.
func (edit *Change) Print(out *Output, asJSON bool, drain time.Duration) error {
	if edit.Change != nil {
		if total := edit.Change.RestartTime(drain); total > 0 {
			edit.RestartTime = total.String()
		}
	}
	if asJSON {
		text, err := json.MarshalIndent(edit, "", "  ")
		if err != nil {
			return err
		}
		out.Printf("%s\n", text)
	} else if edit.Change != nil {
		out.Printf("%s", edit.Change.Text(drain))
		if edit.Held != "" {
			out.Printf("would be held: %s\n", edit.Held)
		}
	}
	if edit.Held != "" {
		return ExitError(ExitFailed)
	}
	return nil
}

// Report prints that the configuration is valid, and the change that --diff asks for.
func (f *ValidateFlags) Report(ctx context.Context, out *Output, program, socket, file string,
	next *trench.Config, defaults trench.Defaults, drain time.Duration,
) error {
	edit := Change{Valid: true}
	if f.Diff.On {
		old, err := f.previous(ctx, program, socket, defaults)
		if err != nil {
			return Usage("--diff: %w", Explain(err))
		}
		edit.Compare(old, next)
	}
	if f.Output == "table" {
		out.Printf("%s: valid\n", file)
	}
	return edit.Print(out, f.Output == "json", drain)
}

// previous returns the configuration that --diff compares with.
func (f *ValidateFlags) previous(ctx context.Context, program, socket string, defaults trench.Defaults) (*trench.Config,
	error,
) {
	if f.Diff.File != "" {
		return trenchfile.Read(f.Diff.File, defaults)
	}
	r, err := Call(ctx, program, AdminFlags{socket}, adminv1.NewConfigurationServiceClient,
		adminv1.ConfigurationServiceClient.GetConfiguration, &adminv1.GetConfigurationRequest{})
	if err != nil {
		return nil, err
	}
	return trenchfile.Parse("configuration in force", []byte(r.GetTrenchFile()), defaults)
}
