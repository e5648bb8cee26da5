package trench

import (
	"cmp"
	"fmt"
	"reflect"
	"slices"
	"time"
)

// Defaults are the values of fields that an attractor or a gateway omits.
type Defaults struct {
	Interface             string
	LocalASN, RemoteASN   uint32
	LocalPort, RemotePort uint16
	HoldTime              time.Duration
}

// DefaultDefaults returns Meridio's numbers (docs/architecture.md#names-and-numbers-of-meridio).
func DefaultDefaults() Defaults {
	return Defaults{"ext-vlan", 8103, 4248829953, 10179, 10179, 3 * time.Second}
}

// Validate rejects defaults that are invalid in the file.
func (d Defaults) Validate() error {
	invalid := func(name string, problem Problem) error {
		return fmt.Errorf("default %s %s", name, problem.Message(nil))
	}
	if d.LocalPort == 0 || d.RemotePort == 0 {
		return fmt.Errorf("default BGP ports %d (local) and %d (remote): a port lies between 1 and 65535",
			d.LocalPort, d.RemotePort)
	}
	field := Field{form: forms["interface"], Required: true}
	if problem := field.check(reflect.ValueOf(d.Interface), d.Interface); problem != (Problem{}) {
		return invalid("interface", problem)
	}
	for i, asn := range []uint32{d.LocalASN, d.RemoteASN} {
		if problem := checkASN(int64(asn)); problem != (Problem{}) {
			return invalid([]string{"local", "remote"}[i]+" AS number", problem)
		}
	}
	if problem := checkHoldTime(d.HoldTime); problem != (Problem{}) {
		return invalid("hold time", problem)
	}
	return nil
}

// Complete returns the configuration with the defaults of the fields that are left out, which are
// zero.
func (c *Config) Complete(d Defaults) *Config {
	full := *c
	full.Attractor.Interface = cmp.Or(c.Attractor.Interface, d.Interface)
	full.Attractor.Gateways = slices.Clone(c.Attractor.Gateways)
	for i := range full.Attractor.Gateways {
		full.Attractor.Gateways[i].complete(d)
	}
	full.Streams = slices.Clone(c.Streams)
	for i := range full.Streams {
		full.Streams[i] = full.Streams[i].Complete()
	}
	return &full
}

func (g *Gateway) complete(d Defaults) {
	if g.BFD != nil {
		bfd := *g.BFD // the gateway shares it with the original
		setDefaults(&bfd)
		g.BFD = &bfd
	}
	// A static gateway has no BGP session, and static gateways with different defaults of it would
	// not compare equal.
	if g.Protocol == Static {
		return
	}
	g.LocalASN, g.RemoteASN = cmp.Or(g.LocalASN, int64(d.LocalASN)), cmp.Or(g.RemoteASN, int64(d.RemoteASN))
	g.LocalPort, g.RemotePort = cmp.Or(g.LocalPort, int(d.LocalPort)), cmp.Or(g.RemotePort, int(d.RemotePort))
	g.HoldTime = cmp.Or(g.HoldTime, d.HoldTime)
}

// Complete returns the stream with the defaults of the fields that are left out.
func (s Stream) Complete() Stream {
	setDefaults(&s)
	setDefaults(&s.Maglev)
	check := &s.Check
	if *check == (Check{}) {
		return s
	}
	timeout := check.Timeout
	setDefaults(check)
	// Only a timeout that the user wrote is compared with the interval.
	if timeout == 0 {
		check.Timeout = min(check.Timeout, check.Interval)
	}
	check.FastInterval = cmp.Or(check.FastInterval, check.Interval)
	if check.HTTP != (HTTPCheck{}) {
		setDefaults(&check.HTTP)
	}
	return s
}

// setDefaults sets the zero fields of an object to the defaults in their tags. A field that can be
// zero keeps it: its default is set before it is read, see [Field.Default].
func setDefaults[T any](object *T) {
	value := reflect.ValueOf(object).Elem()
	fields := FieldsOf(value.Type())
	for i := range fields {
		field := fields[i].Of(value)
		text := fields[i].Tag.Get("default")
		if _, own := fields[i].Default(); text != "" && !own && field.IsZero() {
			fields[i].Parse(text, field)
		}
	}
}
