package main

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
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
	instruction = regexp.MustCompile(`(?m)^(USER|EXPOSE|ENTRYPOINT|CMD|WORKDIR) (.*)$`)
	binaryCopy  = regexp.MustCompile(`(?m)^COPY --from=build /out/(\S+) (\S+)$`)
	link        = regexp.MustCompile(`ln -sf (\S+) (\S+)`)
	setcap      = regexp.MustCompile(`setcap ([a-z_,]+)\+ep (\S+)`)
)

// readDockerfile reads the user, ports, command, directory, files and file capabilities.
func readDockerfile(path string) (*imageSpec, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	spec := &imageSpec{capabilities: map[string][]byte{}, binaries: map[string]string{}, links: map[string]string{}}
	for _, m := range binaryCopy.FindAllStringSubmatch(string(text), -1) {
		spec.binaries[m[2]] = m[1]
	}
	for _, m := range link.FindAllStringSubmatch(string(text), -1) {
		spec.links[m[2]] = m[1]
	}
	// What precedes the last stage is of the build.
	final := string(text)[strings.LastIndex(string(text), "\nFROM ")+1:]
	for _, m := range instruction.FindAllStringSubmatch(final, -1) {
		switch m[1] {
		case "WORKDIR":
			spec.config.WorkingDir = m[2]
		case "USER":
			spec.config.User = m[2]
		case "EXPOSE":
			spec.config.ExposedPorts = map[string]struct{}{}
			for _, port := range strings.Fields(m[2]) {
				spec.config.ExposedPorts[port] = struct{}{}
			}
		case "ENTRYPOINT":
			err = json.Unmarshal([]byte(m[2]), &spec.config.Entrypoint)
		case "CMD":
			err = json.Unmarshal([]byte(m[2]), &spec.config.Cmd)
		}
		if err != nil {
			return nil, fmt.Errorf("failed to parse %s of %s: %w", m[1], path, err)
		}
	}
	if c := spec.config; c.User == "" || len(c.Entrypoint) == 0 || len(c.Cmd) == 0 || len(c.ExposedPorts) == 0 {
		return nil, fmt.Errorf("%s lacks one of USER, EXPOSE, ENTRYPOINT and CMD", path)
	}
	spec.bird = strings.Contains(final, " bird2 ")
	for _, m := range setcap.FindAllStringSubmatch(string(text), -1) {
		if spec.capabilities[m[2]], err = encodeCapabilities(m[1]); err != nil {
			return nil, fmt.Errorf("setcap in %s: %w", path, err)
		}
	}
	return spec, nil
}

// capabilityBits are the numbers of linux/capability.h.
var capabilityBits = map[string]uint{"cap_net_bind_service": 10, "cap_net_admin": 12, "cap_net_raw": 13}

// encodeCapabilities returns a vfs_cap_data of revision 2: permitted and effective.
func encodeCapabilities(names string) ([]byte, error) {
	var permitted uint32
	for name := range strings.SplitSeq(names, ",") {
		bit, ok := capabilityBits[name]
		if !ok {
			return nil, fmt.Errorf("unknown capability %q", name)
		}
		permitted |= 1 << bit
	}
	const revision2, effective = 0x02000000, 1
	data := binary.LittleEndian.AppendUint32(nil, revision2|effective)
	data = binary.LittleEndian.AppendUint32(data, permitted)
	return append(data, make([]byte, 12)...), nil // inheritable, and the upper halves
}
