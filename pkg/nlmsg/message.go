package nlmsg

import (
	"bytes"
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"
)

// headerLength is the size of struct nlmsghdr.
const headerLength = unix.SizeofNlMsghdr

// Messages is a buffer of encoded netlink messages. Socket sets their lengths and sequence numbers
// when it sends them.
type Messages struct {
	Data   []byte
	starts []int
}

// Len returns the number of messages.
func (m *Messages) Len() int { return len(m.starts) }

// Append appends copies of the messages of more.
func (m *Messages) Append(more *Messages) {
	shift := len(m.Data)
	m.Data = append(m.Data, more.Data...)
	for _, at := range more.starts {
		m.starts = append(m.starts, at+shift)
	}
}

// slice returns the messages from..to-1. They share the data of m.
func (m *Messages) slice(from, to int) *Messages {
	begin, end := m.starts[from], len(m.Data)
	if to < len(m.starts) {
		end = m.starts[to]
	}
	part := &Messages{Data: m.Data[begin:end]}
	for _, at := range m.starts[from:to] {
		part.starts = append(part.starts, at-begin)
	}
	return part
}

// SetFlags adds flags to the last message.
func (m *Messages) SetFlags(flags uint16) {
	// In struct nlmsghdr the flags follow the length and the type.
	b := m.Data[m.starts[len(m.starts)-1]+6:]
	binary.NativeEndian.PutUint16(b, binary.NativeEndian.Uint16(b)|flags)
}

// Begin starts a message with the family-specific header, whose length must be a multiple of 4.
func (m *Messages) Begin(kind, flags uint16, header ...byte) {
	m.starts = append(m.starts, len(m.Data))
	m.Data = append(m.Data, make([]byte, headerLength)...)
	at := m.Data[len(m.Data)-headerLength:]
	binary.NativeEndian.PutUint16(at[4:], kind)
	binary.NativeEndian.PutUint16(at[6:], flags|unix.NLM_F_REQUEST)
	m.Data = append(m.Data, header...)
}

func (m *Messages) number(first uint32) {
	for i, at := range m.starts {
		end := len(m.Data)
		if i+1 < len(m.starts) {
			end = m.starts[i+1]
		}
		// In struct nlmsghdr the length has offset 0, the sequence number offset 8.
		binary.NativeEndian.PutUint32(m.Data[at:], uint32(end-at))
		binary.NativeEndian.PutUint32(m.Data[at+8:], first+uint32(i))
	}
}

// Bytes adds an attribute.
func (m *Messages) Bytes(kind uint16, value []byte) {
	at := m.begin(kind)
	m.Data = append(m.Data, value...)
	m.end(at)
}

// Text adds a NUL-terminated string attribute.
func (m *Messages) Text(kind uint16, value string) {
	at := m.begin(kind)
	m.Data = append(append(m.Data, value...), 0)
	m.end(at)
}

// Uint32 adds an attribute in host byte order, which rtnetlink uses.
func (m *Messages) Uint32(kind uint16, value uint32) {
	m.Bytes(kind, binary.NativeEndian.AppendUint32(nil, value))
}

// Uint32BE adds an attribute in network byte order, which netfilter uses.
func (m *Messages) Uint32BE(kind uint16, value uint32) {
	m.Bytes(kind, binary.BigEndian.AppendUint32(nil, value))
}

// Uint64BE adds an attribute in network byte order.
func (m *Messages) Uint64BE(kind uint16, value uint64) {
	m.Bytes(kind, binary.BigEndian.AppendUint64(nil, value))
}

// Nested adds a nested attribute. content adds the inner attributes.
func (m *Messages) Nested(kind uint16, content func()) {
	at := m.begin(kind | unix.NLA_F_NESTED)
	content()
	m.end(at)
}

func (m *Messages) begin(kind uint16) int {
	at := len(m.Data)
	m.Data = binary.NativeEndian.AppendUint16(m.Data, 0)
	m.Data = binary.NativeEndian.AppendUint16(m.Data, kind)
	return at
}

func (m *Messages) end(at int) {
	// The length excludes the padding.
	binary.NativeEndian.PutUint16(m.Data[at:], uint16(len(m.Data)-at))
	for len(m.Data)%unix.NLA_ALIGNTO != 0 {
		m.Data = append(m.Data, 0)
	}
}

// Attributes is a sequence of encoded attributes. The methods follow a path of nested attributes
// and return the zero value if the attribute is absent.
type Attributes []byte

// Netfilter skips the header of a netfilter message (struct nfgenmsg) and returns its attributes.
func Netfilter(data []byte) Attributes { return data[min(4, len(data)):] }

// All iterates over the attributes, without the flags in their types. It stops at a malformed one.
func (b Attributes) All() func(yield func(kind uint16, value Attributes) bool) {
	return func(yield func(uint16, Attributes) bool) {
		for len(b) >= unix.SizeofNlAttr {
			length := int(binary.NativeEndian.Uint16(b))
			if length < unix.SizeofNlAttr || length > len(b) {
				return
			}
			kind := binary.NativeEndian.Uint16(b[2:]) &^ (unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER)
			if !yield(kind, b[unix.SizeofNlAttr:length]) {
				return
			}
			// The last attribute may lack its padding.
			b = b[min(Align(length), len(b)):]
		}
	}
}

// Get returns the value of the first attribute at path. The value shares the data of b.
func (b Attributes) Get(path ...uint16) Attributes {
	for _, kind := range path {
		var found Attributes
		for k, v := range b.All() {
			if k == kind {
				found = v
				break
			}
		}
		b = found
	}
	return b
}

// Text returns a string attribute without its terminating NUL.
func (b Attributes) Text(path ...uint16) string {
	text, _, _ := bytes.Cut(b.Get(path...), []byte{0})
	return string(text)
}

// Uint32 returns an attribute in host byte order.
func (b Attributes) Uint32(path ...uint16) uint32 {
	if v := b.Get(path...); len(v) >= 4 {
		return binary.NativeEndian.Uint32(v)
	}
	return 0
}

// Uint32BE returns an attribute in network byte order.
func (b Attributes) Uint32BE(path ...uint16) uint32 {
	if v := b.Get(path...); len(v) >= 4 {
		return binary.BigEndian.Uint32(v)
	}
	return 0
}

// Uint64BE returns an attribute in network byte order.
func (b Attributes) Uint64BE(path ...uint16) uint64 {
	if v := b.Get(path...); len(v) >= 8 {
		return binary.BigEndian.Uint64(v)
	}
	return 0
}

// Addr returns an IP address.
func (b Attributes) Addr(path ...uint16) netip.Addr {
	a, _ := netip.AddrFromSlice(b.Get(path...))
	return a
}

// Align rounds up to the alignment of attributes and messages.
func Align(n int) int { return (n + unix.NLA_ALIGNTO - 1) &^ (unix.NLA_ALIGNTO - 1) }
