package nlmsg

import (
	"encoding/binary"

	"golang.org/x/sys/unix"
)

// Messages are netlink messages one after the other.
type Messages struct {
	Data   []byte
	Starts []int
}

// Append adds messages of another.
func (m *Messages) Append(more *Messages) {
	shift := len(m.Data)
	m.Data = append(m.Data, more.Data...)
	for _, at := range more.Starts {
		m.Starts = append(m.Starts, at+shift)
	}
}

func (m *Messages) Slice(from, to int) *Messages {
	end := len(m.Data)
	if to < len(m.Starts) {
		end = m.Starts[to]
	}
	part := &Messages{Data: m.Data[m.Starts[from]:end]}
	for _, at := range m.Starts[from:to] {
		part.Starts = append(part.Starts, at-m.Starts[from])
	}
	return part
}

// Begin begins a message with its fixed header.
func (m *Messages) Begin(kind, flags uint16, header ...byte) {
	m.Starts = append(m.Starts, len(m.Data))
	m.Data = binary.NativeEndian.AppendUint32(m.Data, 0)
	m.Data = binary.NativeEndian.AppendUint16(m.Data, kind)
	m.Data = binary.NativeEndian.AppendUint16(m.Data, flags|unix.NLM_F_REQUEST)
	m.Data = append(m.Data, 0, 0, 0, 0, 0, 0, 0, 0)
	m.Data = append(m.Data, header...)
}

// End notes the length of the message that was begun last.
func (m *Messages) End() *Messages {
	at := m.Starts[len(m.Starts)-1]
	binary.NativeEndian.PutUint32(m.Data[at:], uint32(len(m.Data)-at))
	return m
}

func (m *Messages) Bytes(kind uint16, value []byte) {
	m.Data = binary.NativeEndian.AppendUint16(m.Data, uint16(4+len(value)))
	m.Data = binary.NativeEndian.AppendUint16(m.Data, kind)
	m.Data = append(m.Data, value...)
	for len(m.Data)%4 != 0 {
		m.Data = append(m.Data, 0)
	}
}

func (m *Messages) Text(kind uint16, value string) {
	m.Data = binary.NativeEndian.AppendUint16(m.Data, uint16(4+len(value)+1))
	m.Data = binary.NativeEndian.AppendUint16(m.Data, kind)
	m.Data = append(m.Data, value...)
	m.Data = append(m.Data, 0)
	for len(m.Data)%4 != 0 {
		m.Data = append(m.Data, 0)
	}
}

// Uint32BE writes a number as netfilter wants it, native as routing does.
func (m *Messages) Uint32BE(kind uint16, value uint32) {
	m.Bytes(kind, binary.BigEndian.AppendUint32(nil, value))
}

func (m *Messages) Uint32(kind uint16, value uint32) {
	m.Bytes(kind, binary.NativeEndian.AppendUint32(nil, value))
}

// BeginNested begins an attribute of attributes; shut ends it.
func (m *Messages) BeginNested(kind uint16) int {
	at := len(m.Data)
	m.Data = binary.NativeEndian.AppendUint16(m.Data, 0)
	m.Data = binary.NativeEndian.AppendUint16(m.Data, kind|unix.NLA_F_NESTED)
	return at
}

func (m *Messages) EndNested(at int) {
	binary.NativeEndian.PutUint16(m.Data[at:], uint16(len(m.Data)-at))
}

// Attributes walks attributes without their flags; it ends at a malformed one.
func Attributes(b []byte) func(yield func(kind uint16, value []byte) bool) {
	return func(yield func(uint16, []byte) bool) {
		for len(b) >= 4 {
			length := int(binary.NativeEndian.Uint16(b))
			if length < 4 || length > len(b) {
				return
			}
			kind := binary.NativeEndian.Uint16(b[2:]) &^ (unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER)
			if !yield(kind, b[4:length]) {
				return
			}
			b = b[min(Align(length), len(b)):]
		}
	}
}

// Attribute returns the value of the first attribute of a kind, or nil.
func Attribute(b []byte, kind uint16) []byte {
	for k, v := range Attributes(b) {
		if k == kind {
			return v
		}
	}
	return nil
}

// Text reads a string that ends with a zero byte.
func Text(b []byte) string {
	for i, c := range b {
		if c == 0 {
			return string(b[:i])
		}
	}
	return string(b)
}

// Uint32BE and nativeUint32 read a number; 0 if it is too short.
func Uint32BE(b []byte) uint32 {
	if len(b) < 4 {
		return 0
	}
	return binary.BigEndian.Uint32(b)
}

func Uint32(b []byte) uint32 {
	if len(b) < 4 {
		return 0
	}
	return binary.NativeEndian.Uint32(b)
}

func Uint64BE(b []byte) uint64 {
	if len(b) < 8 {
		return 0
	}
	return uint64(Uint32BE(b))<<32 | uint64(Uint32BE(b[4:]))
}

func Uint32Bytes(x uint32) []byte { return binary.NativeEndian.AppendUint32(nil, x) }

func Align(n int) int { return (n + 3) &^ 3 }
