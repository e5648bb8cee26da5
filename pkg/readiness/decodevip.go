package readiness

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/vip"
)

// field is one field of a message in wire format.
type field struct {
	number   protowire.Number
	wireType protowire.Type
	varint   uint64 // protowire.VarintType
	bytes    []byte // protowire.BytesType; part of the message
}

func (f *field) is(number protowire.Number, wireType protowire.Type) bool {
	return f.number == number && f.wireType == wireType
}

// consume decodes the first field of a non-empty message and returns the rest. It has a fast path
// for tags, lengths and values below 128, which are one byte long.
func (f *field) consume(message []byte) (rest []byte, err error) {
	n := 1
	if tag := message[0]; tag < 0x80 && tag > 7 {
		f.number, f.wireType = protowire.Number(tag>>3), protowire.Type(tag&7)
	} else if f.number, f.wireType, n = protowire.ConsumeTag(message); n < 0 {
		return nil, protowire.ParseError(n)
	}
	rest = message[n:]
	small := len(rest) > 0 && rest[0] < 0x80
	switch {
	case f.wireType == protowire.VarintType && small:
		f.varint, n = uint64(rest[0]), 1
	case f.wireType == protowire.VarintType:
		f.varint, n = protowire.ConsumeVarint(rest)
	case f.wireType == protowire.BytesType && small && len(rest) > int(rest[0]):
		n = 1 + int(rest[0])
		f.bytes = rest[1:n]
	case f.wireType == protowire.BytesType:
		f.bytes, n = protowire.ConsumeBytes(rest)
	default:
		n = protowire.ConsumeFieldValue(f.number, f.wireType, rest)
	}
	if n < 0 {
		return nil, protowire.ParseError(n)
	}
	return rest[n:], nil
}

// detail is a detail as received, and after cleanDetail.
type detail struct{ received, clean string }

var errNotUTF8 = errors.New("a detail is not valid UTF-8")

// set sets d to the given text, unless it is unchanged.
func (d *detail) set(text []byte) error {
	if string(text) == d.received {
		return nil
	}
	if !utf8.Valid(text) {
		return errNotUTF8
	}
	received := string(text)
	*d = detail{received, cleanDetail(received)}
	return nil
}

// since is a Timestamp in wire format and its time, which is zero for an invalid Timestamp.
type since struct {
	encoded []byte
	time    time.Time
}

// set sets s to the given Timestamp, unless it is unchanged.
func (s *since) set(encoded []byte) error {
	if len(encoded) > 0 && bytes.Equal(encoded, s.encoded) {
		return nil
	}
	seconds, nanos, err := consumeTime(encoded)
	if err != nil {
		return err
	}
	s.encoded, s.time = append(s.encoded[:0], encoded...), time.Time{}
	if t := (&timestamppb.Timestamp{Seconds: seconds, Nanos: nanos}); t.IsValid() {
		s.time = t.AsTime()
	}
	return nil
}

// consumeTime decodes a Timestamp or Duration.
func consumeTime(message []byte) (seconds int64, nanos int32, err error) {
	var f field
	for len(message) > 0 {
		message, err = f.consume(message)
		switch {
		case err != nil:
			return 0, 0, err
		case f.is(fieldSeconds, protowire.VarintType):
			seconds = int64(f.varint)
		case f.is(fieldNanos, protowire.VarintType):
			nanos = int32(f.varint)
		}
	}
	return seconds, nanos, nil
}

// vipReadiness decodes the readiness of a VIP into r. The drain time counts from the receipt.
func (d *decoder) vipReadiness(r *VIPReadiness, message []byte, at time.Time) (err error) {
	var f field
	var name []byte
	var state readinessv1.VipState
	var drainSeconds int64
	var drainNanos int32
	for len(message) > 0 {
		message, err = f.consume(message)
		switch {
		case err != nil:
		case f.wireType == protowire.VarintType:
			switch f.number {
			case fieldState:
				state = readinessv1.VipState(f.varint)
			case fieldReason:
				r.Reason = readinessv1.VipReason(f.varint)
			case fieldReadyTargets:
				r.ReadyTargets = uint32(f.varint)
			case fieldTotalTargets:
				r.TotalTargets = uint32(f.varint)
			}
		case f.wireType == protowire.BytesType:
			switch f.number {
			case fieldVIP:
				name = f.bytes
			case fieldDetail:
				err = d.sharedDetail.set(f.bytes)
				r.Detail = d.sharedDetail.clean
			case fieldSince:
				err = d.sharedSince.set(f.bytes)
				r.Since = d.sharedSince.time
			case fieldDrainFor:
				drainSeconds, drainNanos, err = consumeTime(f.bytes)
			}
		}
		if err != nil {
			return err
		}
	}
	v, err := d.names.name(name, false)
	if err != nil {
		return err
	}
	known := slices.Index(wireStates, state)
	if known < 0 {
		return fmt.Errorf("VIP %s has the unknown state %d", v, state)
	}
	r.VIP, r.State = v, vip.State(known)
	if r.State == vip.Draining {
		drain := &durationpb.Duration{Seconds: drainSeconds, Nanos: drainNanos}
		left, err := durationFromProto(drain, "drain_for", 0, maxStaleGrace)
		if err != nil {
			return fmt.Errorf("VIP %s: %w", v, err)
		}
		r.DrainEnd = at.Add(left)
	}
	// A reason added by a newer version does not invalidate the state.
	if r.Reason < 0 || int(r.Reason) >= len(readinessv1.VipReason_name) {
		r.Reason = readinessv1.VipReason_VIP_REASON_UNSPECIFIED
	}
	return nil
}
