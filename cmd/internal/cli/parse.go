package cli

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"

	"github.com/alecthomas/kong"
)

// Alias sets a variable of the program from a variable of another program, or from a former name.
type Alias struct {
	Names    []string // the first set variable counts
	Variable string
	Convert  func(string) string // nil keeps the value
	// EmptyIsUnset treats an empty value as unset, instead of passing it to the check of the flag.
	EmptyIsUnset bool
}

// Renamed returns an alias without conversion.
func Renamed(variable string, names ...string) Alias { return Alias{Names: names, Variable: variable} }

// Adopt sets unset variables from their aliases. It returns the used aliases by variable.
func Adopt(aliases []Alias) map[string]string {
	adopted := map[string]string{}
	for _, a := range aliases {
		for _, name := range a.Names {
			value, given := os.LookupEnv(name)
			// The own variable of the program takes precedence over its aliases.
			if _, set := os.LookupEnv(a.Variable); set || !given || a.EmptyIsUnset && value == "" {
				continue
			}
			if a.Convert != nil {
				value = a.Convert(value)
			}
			if os.Setenv(a.Variable, value) == nil {
				adopted[a.Variable] = name
			}
		}
	}
	return adopted
}

// given returns the name under which the user set a variable.
func (p Program) given(variable string) string { return cmp.Or(p.adopted[variable], variable) }

// Mapper returns an option that parses flags of type T. The error describes a valid value.
func Mapper[T any](description string, parse func(string) (T, error)) kong.Option {
	return mapper(description, func(_, text string) (T, error) { return parse(text) })
}

// addressMapper returns an option that parses flags of type [Address], with their default ports.
func addressMapper(ports map[string]uint16) kong.Option {
	return mapper("an address such as 127.0.0.1, with or without a port", func(flag, text string) (Address, error) {
		return parseAddress(text, ports[flag])
	})
}

func mapper[T any](description string, parse func(flag, text string) (T, error)) kong.Option {
	return kong.TypeMapper(reflect.TypeFor[T](),
		kong.MapperFunc(func(ctx *kong.DecodeContext, target reflect.Value) error {
			var text string
			if err := ctx.Scan.PopValueInto("value", &text); err != nil {
				return err
			}
			value, err := parse(ctx.Value.Name, text)
			if err != nil {
				return fmt.Errorf("%q is not %s: %w", text, description, err)
			}
			target.Set(reflect.ValueOf(value))
			return nil
		}))
}

// ParsePrefix parses a prefix without host bits.
func ParsePrefix(text string) (netip.Prefix, error) {
	prefix, err := netip.ParsePrefix(text)
	if err == nil && prefix != prefix.Masked() {
		err = fmt.Errorf("it has host bits set; write %s", prefix.Masked())
	}
	return prefix, err
}

// parse parses a command line. The error has every invalid value; kong alone stops at the first.
func parse(parser *kong.Kong, args []string) (*kong.Context, error) {
	var problems []error
	for {
		parsed, err := parser.Parse(args)
		if err == nil {
			return parsed, errors.Join(problems...)
		}
		// The missing flag may have been removed below, after an error.
		if len(problems) > 0 && strings.HasPrefix(err.Error(), "missing ") {
			return nil, errors.Join(problems...)
		}
		err = nameEnumVariable(parser, args, err)
		// Parse again without the invalid flag, to find the next invalid one.
		rest, restore := without(parser, args, err)
		defer restore()
		if rest == nil {
			return nil, errors.Join(append(problems, suggest(parser, args, err))...)
		}
		problems = append(problems, err)
		args = rest
	}
}

// fromVariable matches kong's error about the value of a variable.
var fromVariable = regexp.MustCompile(`\(from envar ([A-Z0-9_]+)=`)

// ofEnum matches kong's error about a value that is not in an enum. It does not name the variable.
var ofEnum = regexp.MustCompile(`^--([a-z0-9-]+)\b.* must be one of `)

// nameEnumVariable adds the name of the variable to an enum error about its value.
func nameEnumVariable(parser *kong.Kong, args []string, err error) error {
	m := ofEnum.FindStringSubmatch(err.Error())
	if m == nil {
		return err
	}
	flag := "--" + m[1]
	given := func(arg string) bool { return arg == flag || strings.HasPrefix(arg, flag+"=") }
	// The command line takes precedence over the variable, so the value is not from it.
	if slices.ContainsFunc(args, given) {
		return err
	}
	_ = kong.Visit(parser.Model, func(node kong.Visitable, next kong.Next) error { // no visit fails
		if f, ok := node.(*kong.Flag); ok && f.Name == m[1] {
			for _, name := range f.Envs {
				if value, set := os.LookupEnv(name); set && !fromVariable.MatchString(err.Error()) {
					err = fmt.Errorf("%w (from envar %s=%q)", err, name, value)
				}
			}
		}
		return next(nil)
	})
	return err
}

// without removes the flag of an error from the arguments or from the environment. It returns nil
// if the error does not concern a flag.
func without(parser *kong.Kong, args []string, err error) (rest []string, restore func()) {
	if m := fromVariable.FindStringSubmatch(err.Error()); m != nil {
		// The text may be a part of a value: then the variable may not be set.
		if value, set := os.LookupEnv(m[1]); set {
			_ = os.Unsetenv(m[1]) // fails only for empty names
			return slices.Clone(args), func() { _ = os.Setenv(m[1], value) }
		}
	}
	for i, arg := range args {
		if !strings.HasPrefix(arg, "--") || !strings.Contains(arg, "=") {
			continue
		}
		rest := slices.Delete(slices.Clone(args), i, i+1)
		// Without the flag of the error, the parser returns another error or none.
		if _, other := parser.Parse(rest); other == nil || other.Error() != err.Error() {
			return rest, func() {}
		}
	}
	return nil, func() {}
}

// suggest adds the name of a similar command to the error about a mistyped command, which kong
// parses as an argument of the default command.
func suggest(parser *kong.Kong, args []string, err error) error {
	if !strings.HasPrefix(err.Error(), "unexpected argument ") || parser.Model.DefaultCmd == nil {
		return err
	}
	command := parser.Model.DefaultCmd
	// Without a default command, kong suggests a similar one.
	parser.Model.DefaultCmd = nil
	defer func() { parser.Model.DefaultCmd = command }()
	if _, other := parser.Parse(args); other != nil && strings.Contains(other.Error(), "did you mean") {
		return other
	}
	return err
}

var flagName = regexp.MustCompile(`--([a-z][a-z0-9-]*)`)

// nameVariables adds to each line of a message the variables that set the flags in the line.
func (p Program) nameVariables(parsed *kong.Context, message string) string {
	setters := givenBy(parsed)
	lines := strings.Split(message, "\n")
	for i, line := range lines {
		var set []string
		for _, m := range flagName.FindAllStringSubmatch(line, -1) {
			if v := p.given(setters[m[1]]); v != "" && !strings.Contains(line, v) {
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

// givenBy maps each flag that the user set to its variable, or to "" if set on the command line.
func givenBy(parsed *kong.Context) map[string]string {
	set := map[string]string{}
	for _, f := range parsed.Flags() {
		for _, v := range f.Envs {
			if _, ok := os.LookupEnv(v); ok {
				set[f.Name] = v
			}
		}
	}
	// The command line takes precedence over variables.
	for _, p := range parsed.Path {
		if p.Flag != nil {
			set[p.Flag.Name] = ""
		}
	}
	return set
}

// Given reports whether the user set a flag on the command line or by its variable.
func Given(parsed *kong.Context, name string) bool {
	_, given := givenBy(parsed)[name]
	return given
}
