package cli

import (
	_ "embed" // variables.txt
	"fmt"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/alecthomas/kong"
)

const (
	// prefix begins the names of all variables of flags.
	prefix = "VIPGATE_"
	// testPrefix begins the names of variables that only tests of the project read. They are
	// accepted, because the programs that a test starts inherit them.
	testPrefix = prefix + "TEST_"
)

// variables lists the variables of all programs, generated from their flags. A program accepts the
// variables of other programs, because the containers of a pod may share a block of variables.
//
//go:embed variables.txt
var variables string

// Variables returns the sorted variables that a program reads, including the names of its aliases.
func Variables(p Program, parser *kong.Kong) []string {
	var names []string
	_ = kong.Visit(parser.Model, func(node kong.Visitable, next kong.Next) error { // no visit fails
		if flag, ok := node.(*kong.Flag); ok {
			names = append(names, flag.Envs...)
		}
		return next(nil)
	})
	for _, a := range p.Aliases {
		names = append(names, a.Names...)
	}
	names = slices.DeleteFunc(names, func(name string) bool { return !strings.HasPrefix(name, prefix) })
	slices.Sort(names)
	return slices.Compact(names)
}

// unknownVariables returns an error for each environment variable that has the prefix and that no
// program reads. own lists the variables of this program.
func unknownVariables(own []string) (problems []error) {
	known := slices.Concat(own, strings.Fields(variables))
	for _, entry := range os.Environ() {
		name, _, _ := strings.Cut(entry, "=")
		if !strings.HasPrefix(name, prefix) || strings.HasPrefix(name, testPrefix) || slices.Contains(known, name) {
			continue
		}
		remedy := "no program of vipgate reads it: remove it"
		if near := nearest(name, known); near != "" {
			remedy = "did you mean " + near + "?"
		}
		problems = append(problems, fmt.Errorf("unknown variable %s; %s", name, remedy))
	}
	// The order of the environment is arbitrary.
	slices.SortFunc(problems, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return problems
}

// nearest returns the first known name with the smallest distance from name. It returns "" if
// every distance exceeds a third of name.
func nearest(name string, known []string) (near string) {
	least := max(2, len(name[len(prefix):])/3) + 1
	for _, k := range known {
		d := distance(name, k)
		// A missing last word is a likely mistake, however long the word is.
		if strings.HasPrefix(k, name+"_") {
			d = min(d, 2)
		}
		if d < least {
			near, least = k, d
		}
	}
	return near
}

// distance returns the Levenshtein distance of a and b.
func distance(a, b string) int {
	row := make([]int, len(b)+1) // distances of the current prefix of a to each prefix of b
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0]++
		for j := range len(b) {
			replaced := diagonal
			if a[i] != b[j] {
				replaced++
			}
			diagonal = row[j+1]
			row[j+1] = min(replaced, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}

var (
	serviceHost = regexp.MustCompile(`_SERVICE_HOST$`)
	servicePort = regexp.MustCompile(`_SERVICE_PORT(_[A-Z0-9_]+)?$`)
	portAddress = regexp.MustCompile(`_PORT(_[0-9]+_(TCP|UDP|SCTP))?$`)
	portProto   = regexp.MustCompile(`_PORT_[0-9]+_(TCP|UDP|SCTP)_PROTO$`)
	portNumber  = regexp.MustCompile(`_PORT_[0-9]+_(TCP|UDP|SCTP)_PORT$`)
	portHost    = regexp.MustCompile(`_PORT_[0-9]+_(TCP|UDP|SCTP)_ADDR$`)
	protocol    = regexp.MustCompile(`^(tcp|udp|sctp)$`)
	serviceURL  = regexp.MustCompile(`^(tcp|udp|sctp)://`)
)

// ofService reports whether name and value have the form of the variables that Kubernetes sets in
// containers for a Service whose name begins with vipgate.
func ofService(name, value string) bool {
	name = "_" + strings.TrimPrefix(name, prefix) // the Service may be called vipgate
	_, notAddress := netip.ParseAddr(value)
	_, notPort := strconv.ParseUint(value, 10, 16)
	switch {
	case serviceHost.MatchString(name), portHost.MatchString(name):
		return notAddress == nil
	case portNumber.MatchString(name), servicePort.MatchString(name):
		return notPort == nil
	case portProto.MatchString(name):
		return protocol.MatchString(value)
	}
	return portAddress.MatchString(name) && serviceURL.MatchString(value)
}

// dropServices removes the variables of Services from the environment. A Service named
// vipgate-health, for example, sets VIPGATE_HEALTH_PORT, which no program reads.
func dropServices() {
	for _, entry := range os.Environ() {
		name, value, _ := strings.Cut(entry, "=")
		if strings.HasPrefix(name, prefix) && ofService(name, value) {
			_ = os.Unsetenv(name) // fails only for empty names
		}
	}
}
