package sysctl

import (
	"os"
	"path/filepath"
	"strings"
)

const root = "/proc/sys"

// Key is a kernel parameter: its path below /proc/sys, such as net/ipv4/ip_forward. An interface
// name in it may contain dots.
type Key string

// IPv4Interface returns a parameter of an interface, or of "all".
func IPv4Interface(link, name string) Key { return Key("net/ipv4/conf/" + link + "/" + name) }

// Read returns the value, or "" for a parameter that cannot be read.
func (key Key) Read() string {
	b, _ := os.ReadFile(filepath.Join(root, string(key)))
	return strings.TrimSpace(string(b))
}

// String returns the name for sysctl(8). A name whose first separator is a slash is taken
// literally, which preserves the dots of interface names.
func (key Key) String() string {
	if strings.Contains(string(key), ".") {
		return string(key)
	}
	return strings.ReplaceAll(string(key), "/", ".")
}

// SetCommand returns the command that sets the parameter.
func (key Key) SetCommand(value string) string { return "sysctl -w " + key.String() + "=" + value }

// Glob returns the parameters that match a [filepath.Match] pattern.
func Glob(pattern string) []Key {
	paths, _ := filepath.Glob(filepath.Join(root, pattern)) // a malformed pattern matches nothing
	keys := make([]Key, len(paths))
	for i, p := range paths {
		keys[i] = Key(strings.TrimPrefix(p, root+"/"))
	}
	return keys
}
