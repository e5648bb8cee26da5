package readiness

import (
	"fmt"
	"iter"
	"slices"

	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Field numbers of the report messages that this package encodes and decodes without package proto.
const (
	fieldReports = protowire.Number(4) // of ReportAdvertisementRequest (vips)

	fieldAdvertisement       = protowire.Number(2) // of VipAdvertisement; its VIP is fieldVIP
	fieldAdvertisementReason = protowire.Number(3)
	fieldUnconfirmed         = protowire.Number(4)
)

const (
	// reportBytes bounds an encoded VipAdvertisement with its tag and length.
	reportBytes = 80
	// reportsPerPart limits the VIPs of a sent part. Parts are large, because each part wakes the
	// goroutines that wait for Server.Report.
	reportsPerPart = partBytes / reportBytes
)

// reportMessage is an outgoing message of a report. It can be marshaled once.
type reportMessage struct {
	header *readinessv1.ReportAdvertisementRequest // without VIPs
	vips   *[]byte                                 // encoded, from gRPC's buffer pool
}

// marshal returns the message in wire format. gRPC returns the buffer of the VIPs to the pool after
// writing it.
func (m *reportMessage) marshal() (mem.BufferSlice, error) {
	header, err := proto.Marshal(m.header)
	return mem.BufferSlice{mem.SliceBuffer(header), mem.NewBuffer(m.vips, mem.DefaultBufferPool())}, err
}

// messages yields the messages of the report for a watch.
func (d ReportDelta) messages(watchID string) iter.Seq[*reportMessage] {
	return func(yield func(*reportMessage) bool) {
		families := FamiliesProto(d.Families)
		rest := d.VIPs
		for last := false; !last; {
			part := rest[:min(len(rest), reportsPerPart)]
			rest = rest[len(part):]
			last = len(rest) == 0
			header := &readinessv1.ReportAdvertisementRequest{WatchId: watchID, Families: families}
			if last {
				// The position marks the report as complete. The last part always has one, even the zero
				// position, and no other part has one.
				header.Applied = &readinessv1.Position{InstanceId: d.Applied.InstanceID, Revision: d.Applied.Revision}
			}
			if !yield(&reportMessage{header, encodeReports(part)}) {
				return
			}
		}
	}
}

// encodeReports encodes the VIPs of a message.
func encodeReports(part []ReportedVIP) *[]byte {
	buffer := mem.DefaultBufferPool().Get(len(part) * reportBytes)
	b, scratch := (*buffer)[:0], [reportBytes]byte{}
	var text [64]byte
	for i := range part {
		r := &part[i]
		m := appendBytes(scratch[:0], fieldVIP, r.VIP.Append(text[:0]))
		m = appendUint(m, fieldAdvertisement, uint64(r.Advertisement))
		m = appendUint(m, fieldAdvertisementReason, uint64(r.Reason))
		m = appendUint(m, fieldUnconfirmed, protowire.EncodeBool(r.Unconfirmed))
		b = appendBytes(b, fieldReports, m)
	}
	*buffer = b
	return buffer
}

// decodeReport decodes a message of a report. complete reports whether the message has a position
// and therefore is the last part.
func decodeReport(data []byte) (watchID string, d ReportDelta, complete bool, err error) {
	var m readinessv1.ReportAdvertisementRequest
	var f field
	for len(data) > 0 {
		rest, err := f.consume(data)
		if err == nil && !f.is(fieldReports, protowire.BytesType) {
			// A single encoded field is a valid message, so fields can be merged one by one.
			err = mergeFields.Unmarshal(data[:len(data)-len(rest)], &m)
		} else if err == nil {
			err = d.decodeVIP(f.bytes, len(rest))
		}
		if err != nil {
			return "", d, false, err
		}
		data = rest
	}
	if err := d.checkUnique(); err != nil {
		return "", d, false, err
	}
	p := m.GetApplied()
	if n := len(p.GetInstanceId()); n > maxNameBytes {
		return "", d, false, fmt.Errorf("applied: the instance_id has %d bytes, more than %d", n, maxNameBytes)
	}
	d.Applied = Position{p.GetInstanceId(), p.GetRevision()}
	if len(m.GetFamilies()) > 0 {
		d.Families = make(map[vip.Family]bool)
	}
	for _, f := range m.GetFamilies() {
		family := slices.Index(wireFamilies, f.GetFamily())
		if family < 0 {
			return "", d, false, fmt.Errorf("families: unknown family %d", f.GetFamily())
		}
		d.Families[vip.Family(family)] = f.GetUp()
	}
	return m.GetWatchId(), d, p != nil, nil
}

// decodeVIP appends a VipAdvertisement. followed is the number of bytes after it, which serves to
// estimate the capacity of d.VIPs.
func (d *ReportDelta) decodeVIP(message []byte, followed int) (err error) {
	var r ReportedVIP
	var f field
	var name []byte
	more := 1 + followed/max(len(message), leastVIPBytes) // estimate
	for len(message) > 0 {
		if message, err = f.consume(message); err != nil {
			return err
		}
		switch {
		case f.is(fieldVIP, protowire.BytesType):
			name = f.bytes
		case f.is(fieldAdvertisement, protowire.VarintType):
			r.Advertisement = readinessv1.Advertisement(f.varint)
		case f.is(fieldAdvertisementReason, protowire.VarintType):
			r.Reason = readinessv1.AdvertisementReason(f.varint)
		case f.is(fieldUnconfirmed, protowire.VarintType):
			r.Unconfirmed = protowire.DecodeBool(f.varint)
		}
	}
	if r.VIP, err = vip.Parse(string(name)); err != nil {
		return err
	}
	if r.Advertisement <= 0 || int(r.Advertisement) >= len(readinessv1.Advertisement_name) {
		return fmt.Errorf("VIP %s has the unknown advertisement %d", r.VIP, r.Advertisement)
	}
	if r.Reason < 0 || int(r.Reason) >= len(readinessv1.AdvertisementReason_name) {
		r.Reason = readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_UNSPECIFIED
	}
	if len(d.VIPs) == MaxVIPsPerMessage {
		return fmt.Errorf("the report holds more than %d VIPs", MaxVIPsPerMessage)
	}
	if d.VIPs == nil {
		d.VIPs = make([]ReportedVIP, 0, min(more, MaxVIPsPerMessage))
	}
	d.VIPs = append(d.VIPs, r)
	return nil
}

// checkUnique checks that no VIP is reported twice.
func (d *ReportDelta) checkUnique() error {
	ascending := true
	for i := 1; i < len(d.VIPs); i++ {
		ascending = ascending && vip.Compare(d.VIPs[i-1].VIP, d.VIPs[i].VIP) < 0
	}
	if ascending {
		return nil
	}
	named := make(vip.Set, len(d.VIPs))
	for i := range d.VIPs {
		v := d.VIPs[i].VIP
		if named.Has(v) {
			return fmt.Errorf("VIP %s is reported twice in one message", v)
		}
		named[v] = struct{}{}
	}
	return nil
}
