package main

import (
	"encoding/binary"
	"time"
)

const (
	// firstPacketTime is the duration of a flood of new flows: connection tracking and the map of
	// --conntrack=loose remember 262 144, for 30 and 120 s.
	firstPacketTime = 10 * time.Millisecond
	// firstSource is the first source address of new flows, 10.128.0.0.
	firstSource = 10<<24 | 128<<16
)

// measureFirst is measure with each packet the first one of its flow.
func (f *frameSender) measureFirst(a *arrivals) (float64, error) {
	kept := f.frames
	defer func() { f.frames = kept }()
	// Continue with the next address: the flows of earlier rounds are remembered.
	f.sources = max(f.renewed, 1)
	defer func() { f.renewed, f.sources = f.sources, 0 }()
	return f.measure(firstPacketTime, a)
}

// renew gives the frames of a batch the next source address, and thus makes new flows of them.
func (f *frameSender) renew(first int) {
	for i := first; i < first+floodBatch; i++ {
		header := f.frames[i][14:34]
		binary.BigEndian.PutUint32(header[12:], firstSource+f.sources)
		binary.BigEndian.PutUint16(header[10:], 0)
		binary.BigEndian.PutUint16(header[10:], ^onesSum(header))
	}
	f.sources++
}
