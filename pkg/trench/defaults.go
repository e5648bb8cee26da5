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

// DefaultDefaults returns Meridio's numbers (docs/meridio.md#what-stays).
func DefaultDefaults() Defaults {
	return Defaults{"ext-vlan", 8103, 4248829953, 10179, 10179, 3 * time.Second}
}

// Validate rejects defaults that are invalid in the file.
func (defaults Defaults) Validate() error {
	invalid := func(name string, problem Problem) error {
		return fmt.Errorf("default %s %s", name, problem.Message(nil))
	}
	if defaults.LocalPort == 0 || defaults.RemotePort == 0 {
		return fmt.Errorf("default BGP ports %d (local) and %d (remote): a port lies between 1 and 65535",
			defaults.LocalPort, defaults.RemotePort)
	}
	field := Field{form: forms["interface"], Required: true}
	if problem := field.check(reflect.ValueOf(defaults.Interface), defaults.Interface); problem != (Problem{}) {
		return invalid("interface", problem)
	}
	for i, asn := range []uint32{defaults.LocalASN, defaults.RemoteASN} {
		if problem := checkASN(int64(asn)); problem != (Problem{}) {
			return invalid([]string{"local", "remote"}[i]+" AS number", problem)
		}
	}
	if problem := checkHoldTime(defaults.HoldTime); problem != (Problem{}) {
		return invalid("hold time", problem)
	}
	return nil
}

// Complete returns the configuration with the defaults of the fields that are left out (zero).
func (config *Config) Complete(defaults Defaults) *Config {
	full := *config
	setDefaults(&full)
	full.Attractor.Interface = cmp.Or(config.Attractor.Interface, defaults.Interface)
	// The original is immutable and may be shared.
	full.Attractor.Gateways = slices.Clone(config.Attractor.Gateways)
	for i := range full.Attractor.Gateways {
		full.Attractor.Gateways[i].complete(defaults)
	}
	full.Streams = slices.Clone(config.Streams)
	for i := range full.Streams {
		full.Streams[i] = full.Streams[i].Complete()
	}
	return &full
}

func (gateway *Gateway) complete(defaults Defaults) {
	if gateway.BFD != nil {
		bfd := *gateway.BFD // the gateway shares it with the original
		setDefaults(&bfd)
		gateway.BFD = &bfd
	}
	// A static gateway has no BGP session, and static gateways with different defaults of it would
	// not compare equal.
	if gateway.Protocol == Static {
		return
	}
	gateway.LocalASN, gateway.RemoteASN = cmp.Or(gateway.LocalASN, int64(defaults.LocalASN)),
		cmp.Or(gateway.RemoteASN, int64(defaults.RemoteASN))
	gateway.LocalPort, gateway.RemotePort = cmp.Or(gateway.LocalPort, int(defaults.LocalPort)),
		cmp.Or(gateway.RemotePort, int(defaults.RemotePort))
	gateway.HoldTime = cmp.Or(gateway.HoldTime, defaults.HoldTime)
}

// Complete returns the stream with the defaults of the fields that are left out.
func (stream Stream) Complete() Stream {
	setDefaults(&stream)
	setDefaults(&stream.Maglev)
	check := &stream.Check
	// A stream without targets may lack a check.
	if *check == (Check{}) {
		return stream
	}
	written := check.SingleCheck
	check.complete()
	check.Any, check.All = check.Any.complete(written), check.All.complete(written)
	return stream
}

func (members Members) complete(whole SingleCheck) Members {
	list := members.List()
	for i := range list {
		list[i].completeMember(whole)
	}
	return MembersOf(list[:]...)
}

// completeMember takes the fields that a member leaves out from the whole check, and sets the
// defaults of the others.
func (single *SingleCheck) completeMember(whole SingleCheck) {
	if *single == (SingleCheck{}) { // an array has fewer items than its length
		return
	}
	single.Interval, single.FastInterval = cmp.Or(single.Interval, whole.Interval),
		cmp.Or(single.FastInterval, whole.FastInterval)
	single.Timeout = cmp.Or(single.Timeout, whole.Timeout)
	single.Rise, single.Fall = cmp.Or(single.Rise, whole.Rise), cmp.Or(single.Fall, whole.Fall)
	single.complete()
}

func (single *SingleCheck) complete() {
	timeout := single.Timeout
	setDefaults(single)
	// Only a timeout that the user wrote is compared with the interval.
	if timeout == 0 {
		single.Timeout = min(single.Timeout, single.Interval)
	}
	single.FastInterval = cmp.Or(single.FastInterval, single.Interval)
	// Defaults must not turn a check into one of another kind.
	if single.HTTP != (HTTPCheck{}) {
		setDefaults(&single.HTTP)
	}
	if single.DNS != (DNSCheck{}) {
		setDefaults(&single.DNS)
	}
	if single.NTP != (NTPCheck{}) {
		setDefaults(&single.NTP)
	}
}

// setDefaults sets the zero fields of an object to the defaults in their tags. A field that can be
// zero keeps it: its default is set before it is read, see [Field.Default].
func setDefaults[Object any](object *Object) {
	value := reflect.ValueOf(object).Elem()
	fields := FieldsOf(value.Type())
	for i := range fields {
		text := fields[i].Tag.Get("default")
		if _, own := fields[i].Default(); text != "" && !own && fields[i].Of(value).IsZero() {
			fields[i].Parse(text, fields[i].Of(value))
		}
	}
}
