package cli

import (
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"

	"github.com/alecthomas/kong"
)

// parse parses a command line. The error names everything in it that cannot be
// read, where the parser stops at the first.
func parse(parser *kong.Kong, args []string) (*kong.Context, error) {
	var problems []error
	for {
		parsed, err := parser.Parse(args)
		if err == nil {
			return parsed, errors.Join(problems...)
		}
		// What is missing may be what was left out below.
		if len(problems) > 0 && strings.HasPrefix(err.Error(), "missing ") {
			return nil, errors.Join(problems...)
		}
		rest, restore := without(parser, args, err)
		defer restore()
		if rest == nil {
			err = suggest(parser, args, err)
		}
		problems = append(problems, err)
		if rest == nil {
			return nil, errors.Join(problems...)
		}
		args = rest
	}
}

// fromVariable matches what the parser says of a value that a variable has.
var fromVariable = regexp.MustCompile(`\(from envar ([A-Z0-9_]+)=`)

// without leaves out the argument, or unsets the variable, of which an error tells;
// nil when that is none of a flag.
func without(parser *kong.Kong, args []string, err error) (rest []string, restore func()) {
	restore = func() {}
	if m := fromVariable.FindStringSubmatch(err.Error()); m != nil {
		value := os.Getenv(m[1])
		if os.Unsetenv(m[1]) != nil {
			return nil, restore
		}
		return slices.Clone(args), func() { _ = os.Setenv(m[1], value) }
	}
	for i, arg := range args {
		if !strings.HasPrefix(arg, "--") || !strings.Contains(arg, "=") {
			continue
		}
		rest := slices.Delete(slices.Clone(args), i, i+1)
		if _, other := parser.Parse(rest); other == nil || other.Error() != err.Error() {
			return rest, restore
		}
	}
	return nil, restore
}

// suggest names the command that a mistyped one is like, which the parser takes for
// an argument of the default command.
func suggest(parser *kong.Kong, args []string, err error) error {
	if !strings.HasPrefix(err.Error(), "unexpected argument ") || parser.Model.DefaultCmd == nil {
		return err
	}
	command := parser.Model.DefaultCmd
	parser.Model.DefaultCmd = nil
	defer func() { parser.Model.DefaultCmd = command }()
	if _, other := parser.Parse(args); other != nil && strings.Contains(other.Error(), "did you mean") {
		return other
	}
	return err
}

var flagName = regexp.MustCompile(`--([a-z][a-z0-9-]*)`)

// nameVariables adds to each line of a message the variables that set the flags which
// it names.
func (p Program) nameVariables(parsed *kong.Context, message string) string {
	lines := strings.Split(message, "\n")
	for i, line := range lines {
		var set []string
		for _, m := range flagName.FindAllStringSubmatch(line, -1) {
			if v := p.variableOf(parsed, m[1]); v != "" && !strings.Contains(line, v) {
				set = append(set, fmt.Sprintf("--%s is set by %s", m[1], v))
			}
		}
		slices.Sort(set)
		if set = slices.Compact(set); len(set) > 0 {
			lines[i] += " (" + strings.Join(set, ", ") + ")"
		}
	}
	return strings.Join(lines, "\n")
}

// variableOf returns the variable that sets a flag, or "".
func (p Program) variableOf(parsed *kong.Context, name string) string {
	for _, step := range parsed.Path {
		if step.Flag != nil && step.Flag.Name == name {
			return ""
		}
	}
	for _, f := range parsed.Flags() {
		for _, v := range f.Envs {
			if _, set := os.LookupEnv(v); set && f.Name == name {
				return p.adopted(v)
			}
		}
	}
	return ""
}

// adopted is the variable of Meridio that the user set for a flag.
func (p Program) adopted(variable string) string {
	if alias := p.Aliases[variable]; alias != "" {
		return alias
	}
	return variable
}
