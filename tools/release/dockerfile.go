package main

import (
	"encoding/binary"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/moby/buildkit/frontend/dockerfile/parser"
)

// imageSpec is what an image has from its Dockerfile, so that docker build and
// make release agree.
type imageSpec struct {
	config       v1.Config
	capabilities map[string][]byte // by path: values of security.capability
	binaries     map[string]string // by path: names of programs
	links        map[string]string // by path: targets of symbolic links
	bird         bool              // it has BIRD
}

var (
	link   = regexp.MustCompile(`ln -sf (\S+) (\S+)`)
	setcap = regexp.MustCompile(`setcap ([a-z_,]+)\+(e?p) (\S+)`)
)

// readDockerfile reads the user, ports, command, directory, files and file capabilities of the last
// stage.
func readDockerfile(path string) (*imageSpec, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	parsed, err := parser.Parse(file)
	if err != nil {
		return nil, fmt.Errorf("failed to parse %s: %w", path, err)
	}
	var spec *imageSpec
	for _, node := range parsed.AST.Children {
		var words []string
		for next := node.Next; next != nil; next = next.Next {
			words = append(words, next.Value)
		}
		switch instruction := strings.ToUpper(node.Value); instruction {
		case "FROM": // the previous stages build the programs
			spec = &imageSpec{
				capabilities: map[string][]byte{}, binaries: map[string]string{}, links: map[string]string{},
			}
		case "COPY":
			if slices.Contains(node.Flags, "--from=build") {
				spec.binaries[words[1]] = strings.TrimPrefix(words[0], "/out/")
			}
		case "RUN":
			if err := spec.run(strings.Join(words, " ")); err != nil {
				return nil, fmt.Errorf("%s: %w", path, err)
			}
		case "WORKDIR":
			spec.config.WorkingDir = words[0]
		case "USER":
			spec.config.User = words[0]
		case "EXPOSE":
			spec.config.ExposedPorts = map[string]struct{}{}
			for _, port := range words {
				spec.config.ExposedPorts[port] = struct{}{}
			}
		case "ENTRYPOINT":
			spec.config.Entrypoint = words
		case "CMD":
			spec.config.Cmd = words
		case "ARG":
		default:
			return nil, fmt.Errorf("%s: the release does not know the instruction %s", path, instruction)
		}
	}
	if spec == nil || spec.config.User == "" || len(spec.config.Entrypoint) == 0 || len(spec.config.Cmd) == 0 ||
		len(spec.config.ExposedPorts) == 0 {
		return nil, fmt.Errorf("%s lacks one of FROM, USER, EXPOSE, ENTRYPOINT and CMD", path)
	}
	return spec, nil
}

// run reads the links, file capabilities and BIRD from a shell command.
func (spec *imageSpec) run(command string) (err error) {
	for _, match := range link.FindAllStringSubmatch(command, -1) {
		spec.links[match[2]] = match[1]
	}
	for _, match := range setcap.FindAllStringSubmatch(command, -1) {
		if spec.capabilities[match[3]], err = encodeCapabilities(match[1], match[2] == "ep"); err != nil {
			return fmt.Errorf("setcap: %w", err)
		}
	}
	spec.bird = spec.bird || slices.Contains(strings.Fields(command), "bird2")
	return nil
}

// capabilityBits are the numbers of linux/capability.h.
var capabilityBits = map[string]uint{"cap_net_bind_service": 10, "cap_net_admin": 12, "cap_net_raw": 13}

// encodeCapabilities returns a vfs_cap_data of revision 2: permitted, and effective or not.
func encodeCapabilities(names string, effective bool) ([]byte, error) {
	var permitted uint32
	for name := range strings.SplitSeq(names, ",") {
		bit, ok := capabilityBits[name]
		if !ok {
			return nil, fmt.Errorf("unknown capability %q", name)
		}
		permitted |= 1 << bit
	}
	const revision2, effectiveFlag = 0x02000000, 1
	header := uint32(revision2)
	if effective {
		header |= effectiveFlag
	}
	data := binary.LittleEndian.AppendUint32(nil, header)
	data = binary.LittleEndian.AppendUint32(data, permitted)
	return append(data, make([]byte, 12)...), nil // inheritable, and the upper halves
}
