package file

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"regexp"
	"unicode/utf8"

	"go.yaml.in/yaml/v4"

	"github.com/vipgate/vipgate/pkg/files"
	"github.com/vipgate/vipgate/pkg/trench"
)

// MaxSize limits the file size. Parsing takes 30 times the size of VIPs and targets, and 100 times
// that of streams: 120 MiB for the 10 000 that a file may have. [trench.MaxVIPs] in the attractor
// and in a stream with 10 000 targets take 5 MB; a ConfigMap holds 1 MiB.
const MaxSize = 8 << 20

// Read reads and parses a trench file. It returns a file system error, an error of
// [trench.Defaults.Validate] or [*Errors].
func Read(path string, defaults trench.Defaults) (*trench.Config, error) {
	data, err := read(path)
	if err != nil {
		return nil, err
	}
	config, err := Parse(path, data, defaults)
	if err == nil {
		config.Digest = sha256.Sum256(data)
	}
	return config, err
}

// read returns the content of a trench file in bounded time.
func read(path string) ([]byte, error) {
	return files.Do(context.Background(), &files.Calls{}, "trench file "+path,
		func() ([]byte, error) { return readFile(path) })
}

func readFile(path string) ([]byte, error) {
	data, err := files.Read(path, MaxSize)
	if err != nil {
		return nil, fmt.Errorf("trench file: %w", err)
	}
	return data, nil
}

// Parse parses data, the content of the trench file name. d has the default interface of the
// attractor, and the default AS numbers, ports and hold time of gateways. The error is [*Errors]
// with all problems of the file, unless [trench.Defaults.Validate] rejects d.
func Parse(name string, data []byte, defaults trench.Defaults) (*trench.Config, error) {
	config, err := ParseExplicit(name, data, defaults)
	if err != nil {
		return nil, err
	}
	return config.Complete(defaults), nil
}

// ParseExplicit is Parse except that omitted fields are zero: [Marshal] omits them, too.
func ParseExplicit(name string, data []byte, defaults trench.Defaults) (*trench.Config, error) {
	if err := defaults.Validate(); err != nil {
		return nil, err
	}
	rejected := &Errors{file: name}
	root := load(rejected, data)
	if root == nil {
		return nil, rejected.err()
	}
	state := reader{}
	config := state.config(root, defaults)
	place := func(path string) string {
		line, _ := position(root, path)
		return fmt.Sprintf("line %d", line)
	}
	for _, found := range state.problems {
		rejected.add(found.line, found.column, found.Path, found.Message(place))
	}
	rejected.More = state.more
	if err := rejected.err(); err != nil {
		return nil, err
	}
	return config, nil
}

// load returns the root node of the only document. Otherwise it records the reason and returns nil.
func load(rejected *Errors, data []byte) *yaml.Node {
	if line, column, what := unreadable(data); what != "" {
		rejected.add(line, column, "", what+": save the file as plain UTF-8 text")
		return nil
	}
	var first, second yaml.Node
	loader, err := yaml.NewLoader(bytes.NewReader(data))
	if err == nil {
		err = loader.Load(&first)
	}
	switch {
	case errors.Is(err, io.EOF), err == nil && (len(first.Content) == 0 || isNull(first.Content[0])):
		rejected.add(1, 1, "", "the file is empty: write the fields trench, attractor and streams")
		return nil
	case err != nil:
		rejected.syntax(err, data)
		return nil
	}
	// The content of a second document must not be ignored silently.
	switch err := loader.Load(&second); {
	case err == nil:
		rejected.add(second.Line, second.Column, "", "a second YAML document begins here: "+
			"one file holds one trench, remove the --- line and what does not belong to it")
		return nil
	case !errors.Is(err, io.EOF):
		rejected.syntax(err, data)
		return nil
	}
	return first.Content[0]
}

// unreadable returns the position and a description of the first invalid UTF-8 sequence or
// control character, or zero values for plain text.
func unreadable(data []byte) (line, column int, what string) {
	line, column = 1, 1
	for offset := 0; offset < len(data); {
		character, size := utf8.DecodeRune(data[offset:])
		switch {
		case character == utf8.RuneError && size == 1:
			return line, column, "the file is not UTF-8 here"
		case character < ' ' && character != '\n' && character != '\r' && character != '\t', character == 0x7f:
			return line, column, fmt.Sprintf("the file has the control character %#02x here", character)
		case character == '\n':
			line, column = line+1, 0
		}
		column++
		offset += size
	}
	return 0, 0, ""
}

// syntax records an error of the YAML library. The library counts the end of a file without a
// final newline as an additional line, so line numbers are limited to the last line.
func (rejected *Errors) syntax(err error, data []byte) {
	var failure *yaml.LoadError
	if !errors.As(err, &failure) {
		rejected.add(1, 1, "", fmt.Sprintf("not valid YAML: %v", err))
		return
	}
	last := lines(data)
	message := failure.Message
	if failure.ContextMsg != "" {
		message = fmt.Sprintf("%s (%s that began in line %d)", message, failure.ContextMsg,
			min(failure.ContextMark.Line, last))
	}
	rejected.add(min(failure.Mark.Line, last), failure.Mark.Column, "",
		"not valid YAML: "+message+": mind the indentation, the brackets and the quotes")
}

// lineBreak matches a line break of YAML 1.1.
var lineBreak = regexp.MustCompile("\r\n|[\n\r\u0085\u2028\u2029]")

func lines(data []byte) int { return 1 + len(lineBreak.FindAllIndex(data, -1)) }
