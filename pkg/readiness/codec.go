package readiness

import (
	"time"

	"google.golang.org/grpc/encoding"
	protocodec "google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/vipgate/vipgate/pkg/vip"
)

// Field numbers of the messages that this package encodes and decodes without package proto. With
// one Go message for each VIP, proto took half of the CPU time of a decision about all VIPs.
const (
	fieldSnapshot = protowire.Number(5) // of WatchReadinessResponse
	fieldDelta    = protowire.Number(6)

	fieldChanged = protowire.Number(1) // of Snapshot (vips) and Delta
	fieldSynced  = protowire.Number(2) // of Snapshot
	fieldRemoved = protowire.Number(2) // of Delta
	fieldLast    = protowire.Number(3)

	fieldVIP          = protowire.Number(1) // of VipReadiness
	fieldState        = protowire.Number(2)
	fieldReason       = protowire.Number(3)
	fieldDetail       = protowire.Number(4)
	fieldReadyTargets = protowire.Number(5)
	fieldTotalTargets = protowire.Number(6)
	fieldSince        = protowire.Number(7)
	fieldDrainFor     = protowire.Number(8)

	fieldSeconds = protowire.Number(1) // of Timestamp and Duration
	fieldNanos   = protowire.Number(2)
)

// codec is gRPC's protobuf codec, extended by the Go types of this package for the messages of
// watches and reports. The wire format is the same.
type codec struct{ encoding.CodecV2 }

// marshaler is a message of this package.
type marshaler interface {
	marshal() (mem.BufferSlice, error)
}

func newCodec() codec { return codec{encoding.GetCodecV2(protocodec.Name)} }

// Marshal implements encoding.CodecV2.
func (c codec) Marshal(v any) (mem.BufferSlice, error) {
	if m, ok := v.(marshaler); ok {
		return m.marshal()
	}
	return c.CodecV2.Marshal(v)
}

// received is a received message of a watch or report in wire format. Its buffer is reused for the
// next message.
type received []byte

// Unmarshal implements encoding.CodecV2. It copies data, which gRPC reuses afterwards.
func (c codec) Unmarshal(data mem.BufferSlice, v any) error {
	r, ok := v.(*received)
	if !ok {
		return c.CodecV2.Unmarshal(data, v)
	}
	*r = (*r)[:0]
	for _, b := range data {
		*r = append(*r, b.ReadOnlyData()...)
	}
	return nil
}

// watchMessage is an outgoing message of a watch. It can be marshaled once.
type watchMessage struct {
	header *response // without a snapshot or delta
	// kind is kindSnapshot or kindDelta if event holds one, encoded.
	kind  kind
	event *[]byte // from gRPC's buffer pool
}

// marshal returns the message in wire format. gRPC returns the event's buffer to the pool after
// writing it.
func (m *watchMessage) marshal() (mem.BufferSlice, error) {
	header, err := proto.Marshal(m.header)
	if err != nil || m.event == nil {
		return mem.BufferSlice{mem.SliceBuffer(header)}, err
	}
	field := fieldDelta
	if m.kind == kindSnapshot {
		field = fieldSnapshot
	}
	header = protowire.AppendTag(header, field, protowire.BytesType)
	header = protowire.AppendVarint(header, uint64(len(*m.event)))
	return mem.BufferSlice{mem.SliceBuffer(header), mem.NewBuffer(m.event, mem.DefaultBufferPool())}, nil
}

const (
	// partBytes bounds the encoded VIPs of a part. It is a size class of gRPC's buffer pool. The next
	// class is 1 MiB (grpc 1.85) and would cost 8 MiB for a frontend with 10 000 VIPs.
	partBytes = 32 << 10
	// vipBytes bounds an encoded VIP without its detail, flagBytes the fields after the VIPs.
	vipBytes, flagBytes = 128, 4
)

// encodeEvent encodes one part of a snapshot or delta and returns the remaining entries.
func encodeEvent(k kind, synced bool, entries []entry, now time.Time) (event *[]byte, rest []entry) {
	size, count := flagBytes, 0
	for i := 0; i < len(entries) && count < vipsPerPart && size < partBytes; i++ {
		if entries[i].record != nil {
			size += entries[i].maxBytes()
			count++
		}
	}
	size = min(size, partBytes)
	event = mem.DefaultBufferPool().Get(size)
	b, scratch := (*event)[:0], [vipBytes + MaxDetailBytes]byte{}
	for count = 0; count < vipsPerPart && len(entries) > 0; {
		e := entries[0]
		if len(b)+e.maxBytes()+flagBytes > size {
			break
		}
		entries = entries[1:]
		switch {
		case e.record == nil:
			continue
		case !e.removed:
			b = appendBytes(b, fieldChanged, appendVIP(scratch[:0], &e.VIPReadiness, now))
		case k == kindDelta:
			b = appendBytes(b, fieldRemoved, e.VIP.Append(scratch[:0]))
		}
		count++
	}
	if k == kindSnapshot {
		b = appendUint(b, fieldSynced, protowire.EncodeBool(synced))
	}
	b = appendUint(b, fieldLast, protowire.EncodeBool(len(entries) == 0))
	*event = b
	return event, entries
}

// maxBytes bounds the encoded size of an entry.
func (e entry) maxBytes() int {
	if e.record == nil {
		return 0
	}
	return vipBytes + len(e.Detail)
}

// appendVIP appends the fields of a VipReadiness message. They must match VIPReadiness.Proto.
func appendVIP(b []byte, r *VIPReadiness, now time.Time) []byte {
	var text [64]byte
	b = appendBytes(b, fieldVIP, r.VIP.Append(text[:0]))
	b = appendUint(b, fieldState, uint64(wireStates[r.State]))
	b = appendUint(b, fieldReason, uint64(r.Reason))
	if r.Detail != "" {
		b = protowire.AppendString(append(b, tag(fieldDetail, protowire.BytesType)), r.Detail)
	}
	b = appendUint(b, fieldReadyTargets, uint64(r.ReadyTargets))
	b = appendUint(b, fieldTotalTargets, uint64(r.TotalTargets))
	if !r.Since.IsZero() {
		b = appendTime(b, fieldSince, r.Since.Unix(), int32(r.Since.Nanosecond()))
	}
	if r.State == vip.Draining {
		left := drainFor(r.DrainEnd, now)
		b = appendTime(b, fieldDrainFor, left.GetSeconds(), left.GetNanos())
	}
	return b
}

// appendUint appends a scalar field, unless it is zero.
func appendUint(b []byte, field protowire.Number, x uint64) []byte {
	switch {
	case x == 0:
		return b
	case x < 0x80:
		return append(b, tag(field, protowire.VarintType), byte(x))
	}
	return protowire.AppendVarint(append(b, tag(field, protowire.VarintType)), x)
}

// appendBytes appends a message or string.
func appendBytes(b []byte, field protowire.Number, x []byte) []byte {
	if len(x) < 0x80 {
		return append(append(b, tag(field, protowire.BytesType), byte(len(x))), x...)
	}
	return protowire.AppendBytes(append(b, tag(field, protowire.BytesType)), x)
}

// tag returns the tag of a field below 16, which is one byte.
func tag(field protowire.Number, wireType protowire.Type) byte {
	return byte(field)<<3 | byte(wireType)
}

// appendTime appends a Timestamp or Duration.
func appendTime(b []byte, field protowire.Number, seconds int64, nanos int32) []byte {
	var m [22]byte
	encoded := appendUint(m[:0], fieldSeconds, uint64(seconds))
	encoded = appendUint(encoded, fieldNanos, uint64(nanos))
	return appendBytes(b, field, encoded)
}
