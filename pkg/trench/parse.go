package trench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"time"
	"unicode/utf8"

	"go.yaml.in/yaml/v4"

	"github.com/vipgate/vipgate/pkg/files"
	"github.com/vipgate/vipgate/pkg/vip"
)

// maxFileSize bounds what is read, and the memory for a file that is refused: parsing takes 20
// times the size. [MaxVIPs] in the attractor and in a stream with 10 000 targets take 5 MB; a
// ConfigMap holds 1 MiB.
const maxFileSize = 8 << 20

// Read reads and parses a trench file. The error is that of the file system, or [*Errors].
func Read(path string, d Defaults) (*Config, error) {
	data, err := files.Do(context.Background(), &files.Calls{}, "trench file "+path, func() ([]byte, error) { return readFile(path) })
	if err != nil {
		return nil, err
	}
	return Parse(path, data, d)
}

func readFile(path string) ([]byte, error) {
	data, err := files.Read(path, maxFileSize)
	if err != nil {
		return nil, fmt.Errorf("trench file: %w", err)
	}
	return data, nil
}

// Parse reads a trench file that was read from name. Gateways that do not say an AS number, port or
// hold time get it from d. The error is [*Errors], with all the problems of the file, unless d
// itself is refused by [Defaults.Validate].
func Parse(name string, data []byte, d Defaults) (*Config, error) {
	if err := d.Validate(); err != nil {
		return nil, err
	}
	r := &report{file: name}
	root := load(r, data)
	if root == nil {
		return nil, r.err()
	}
	p := parser{defaults: d, vips: make(map[vip.VIP]value)}
	config := p.config(value{r: r, node: root})
	p.cross()
	if err := r.err(); err != nil {
		return nil, err
	}
	return config, nil
}

// load returns the root of the only document, or nil after it said why there is none.
func load(r *report, data []byte) *yaml.Node {
	const empty = "the file is empty: write the fields trench, attractor and streams"
	if line, column, what := unreadable(data); what != "" {
		r.add(line, column, "", "%s: save the file as plain UTF-8 text", what)
		return nil
	}
	loader, err := yaml.NewLoader(bytes.NewReader(data))
	if err != nil {
		r.add(1, 1, "", "cannot read YAML: %v", err)
		return nil
	}
	var doc yaml.Node
	switch err := loader.Load(&doc); {
	case errors.Is(err, io.EOF), err == nil && len(doc.Content) == 0:
		r.add(1, 1, "", empty)
		return nil
	case err != nil:
		r.syntax(err, data)
		return nil
	}
	root := doc.Content[0]
	if (value{node: root}).isNull() {
		r.add(1, 1, "", empty)
		return nil
	}
	var second yaml.Node
	switch err := loader.Load(&second); {
	case errors.Is(err, io.EOF):
	case err != nil:
		r.syntax(err, data)
		return nil
	default:
		r.add(second.Line, second.Column, "", "a second YAML document begins here: one file holds one trench, remove the --- line and what does not belong to it")
		return nil
	}
	return root
}

// unreadable finds the first place that is not text.
func unreadable(data []byte) (line, column int, what string) {
	line, column = 1, 1
	for i := 0; i < len(data); {
		c, size := utf8.DecodeRune(data[i:])
		switch {
		case c == utf8.RuneError && size == 1:
			return line, column, "the file is not UTF-8 here"
		case c < ' ' && c != '\n' && c != '\r' && c != '\t', c == 0x7f:
			return line, column, fmt.Sprintf("the file has the control character %#02x here", c)
		case c == '\n':
			line, column = line+1, 0
		}
		column++
		i += size
	}
	return 0, 0, ""
}

// syntax reports an error of the YAML library, which takes the end of a file without a last newline
// for a line of its own.
func (r *report) syntax(err error, data []byte) {
	var at *yaml.LoadError
	if !errors.As(err, &at) {
		r.add(1, 1, "", "not valid YAML: %v", err)
		return
	}
	last := lines(data)
	message := at.Message
	if at.ContextMsg != "" {
		message = fmt.Sprintf("%s (%s that began in line %d)", message, at.ContextMsg, min(at.ContextMark.Line, last))
	}
	r.add(min(at.Mark.Line, last), at.Mark.Column, "", "not valid YAML: %s: mind the indentation, the brackets and the quotes", message)
}

// lines counts lines as YAML 1.1 does, whose line breaks are LF, CR, CR LF, NEL, LS and PS.
func lines(data []byte) int {
	text := strings.ReplaceAll(string(data), "\r\n", "\n")
	n := 1
	for _, c := range text {
		if strings.ContainsRune("\n\r\u0085\u2028\u2029", c) {
			n++
		}
	}
	return n
}

// parser makes a Config of the nodes. It reports each problem with its line and continues, so that
// one run finds them all.
type parser struct {
	defaults Defaults
	// Values that several fields must not share, with their lines.
	vips       map[vip.VIP]value
	gateways   []placed[netip.Addr]
	streamVIPs []placed[vip.VIP]
	targets    []placed[netip.Addr]
	sources    []placed[netip.Addr]
	// vipsRefused is true when the attractor's VIPs are not known completely, so that what does not
	// fit them is not reported.
	vipsRefused bool
}

// placed is something that was read, and where.
type placed[T any] struct {
	is T
	at value
}

func (p *parser) config(v value) *Config {
	o, ok := v.object(fileMapping)
	if !ok {
		return nil
	}
	c := &Config{}
	if v, ok := o.required("trench"); ok {
		c.Trench, _ = v.name()
	}
	if v, ok := o.required("attractor"); ok {
		c.Attractor = p.attractor(v)
	}
	if v, ok := o.optional("streams"); ok {
		names := make(map[string]int)
		c.Streams = items(v, "write a list of streams, or [] for none", func(v value) (Stream, bool) {
			return p.stream(v, names)
		})
	}
	return c
}

// items reads a list whose items are read by item; those it refuses are left out.
func items[T any](v value, remedy string, item func(value) (T, bool)) []T {
	nodes, ok := v.items(remedy)
	if !ok {
		return nil
	}
	result := make([]T, 0, len(nodes))
	for _, v := range nodes {
		if v.r.full() {
			v.r.errors.More = true
			break
		}
		if x, ok := item(v); ok {
			result = append(result, x)
		}
	}
	return result
}

// unique reports a second appearance of the same thing in the same scope.
func unique[T comparable](seen map[T]int, x T, v value, what string) bool {
	if line, twice := seen[x]; twice {
		v.problem("%s %v appears twice, first in line %d: remove one of them or change it", what, x, line)
		return false
	}
	seen[x] = v.node.Line
	return true
}

func (p *parser) attractor(v value) Attractor {
	var a Attractor
	p.vipsRefused = true
	o, ok := v.object(attractorMapping)
	if !ok {
		return a
	}
	if v, ok := o.required("name"); ok {
		a.Name, _ = v.name()
	}
	if v, ok := o.required("vips"); ok && len(v.node.Content) > MaxVIPs {
		v.problem("has %d VIPs: an attractor has %d at most", len(v.node.Content), MaxVIPs)
	} else if ok {
		seen := make(map[vip.VIP]int)
		a.VIPs = items(v, "write a list of VIPs such as [20.0.0.1/32], or [] for none", func(v value) (vip.VIP, bool) {
			x, ok := v.vip()
			if !ok || !unique(seen, x, v, "VIP") {
				return x, false
			}
			p.vips[x] = v
			return x, true
		})
		p.vipsRefused = v.node.Kind != yaml.SequenceNode || len(a.VIPs) != len(v.node.Content)
	}
	if v, ok := o.optional("gateways"); ok {
		names, addresses := make(map[string]int), make(map[netip.Addr]int)
		a.Gateways = items(v, "write a list of gateways, or [] for none", func(v value) (Gateway, bool) {
			return p.gateway(v, names, addresses)
		})
	}
	return a
}

func (p *parser) gateway(v value, names map[string]int, addresses map[netip.Addr]int) (Gateway, bool) {
	g := Gateway{
		LocalASN: p.defaults.LocalASN, RemoteASN: p.defaults.RemoteASN,
		LocalPort: p.defaults.LocalPort, RemotePort: p.defaults.RemotePort,
		HoldTime: p.defaults.HoldTime,
	}
	o, ok := v.object(gatewayMapping)
	if !ok {
		return g, false
	}
	if v, ok := o.required("name"); ok {
		if g.Name, ok = v.name(); ok && g.Name == "BFD" {
			v.problem("is \"BFD\": BIRD's protocol NBR-BFD has that name, take another")
		} else if ok {
			unique(names, g.Name, v, "gateway")
		}
	}
	complete := false
	if v, ok := o.required("address"); ok {
		if g.Address, complete = v.address("169.254.100.150"); complete {
			unique(addresses, g.Address, v, "gateway address")
			p.gateways = append(p.gateways, placed[netip.Addr]{g.Address, v})
		}
	}
	if v, ok := o.optional("protocol"); ok {
		v.protocol()
	}
	o.asn("localASN", &g.LocalASN)
	o.asn("remoteASN", &g.RemoteASN)
	number(o, "localPort", &g.LocalPort)
	number(o, "remotePort", &g.RemotePort)
	if v, ok := o.duration("holdTime", &g.HoldTime); ok {
		if problem := checkHoldTime(g.HoldTime); problem != "" {
			v.problem("%s", problem)
		}
	}
	if v, ok := o.optional("bfd"); ok {
		g.BFD = p.bfd(v)
	}
	if v, ok := o.optional("passwordFile"); ok {
		g.PasswordFile = v.file("the file with the password", "for a session without a password")
	}
	return g, complete
}

func (p *parser) bfd(v value) *BFD {
	b := &BFD{MinTx: defaultBFDInterval, MinRx: defaultBFDInterval, Multiplier: defaultBFDMultiplier}
	if v.isNull() {
		v.problem("is empty: write {} for the defaults %s, %s and %d, or remove the field for no BFD", b.MinTx, b.MinRx, b.Multiplier)
		return b
	}
	o, ok := v.object(bfdMapping)
	if !ok {
		return b
	}
	o.duration("minTx", &b.MinTx)
	o.duration("minRx", &b.MinRx)
	number(o, "multiplier", &b.Multiplier)
	return b
}

// number reads a number within the bounds of its field.
func number[T uint8 | uint16 | uint32 | int](o object, name string, to *T) {
	if v, ok := o.optional(name); ok {
		bounds, _ := o.is.field(name).is.(whole)
		if n, ok := v.number(bounds); ok {
			*to = T(n)
		}
	}
}

func (o object) asn(name string, to *uint32) {
	if v, ok := o.optional(name); ok {
		if n, ok := v.number(anyASN); ok {
			if problem := checkASN(n); problem != "" {
				v.problem("%s", problem)
			}
			*to = n
		}
	}
}

// duration reads a duration within the bounds of its field.
func (o object) duration(name string, to *time.Duration) (value, bool) {
	v, ok := o.optional(name)
	if !ok {
		return v, false
	}
	bounds, _ := o.is.field(name).is.(span)
	d, ok := v.duration(bounds)
	if ok {
		*to = d
	}
	return v, ok
}
