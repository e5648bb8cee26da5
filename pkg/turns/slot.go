package turns

import (
	"crypto/sha256"
	"encoding/binary"
	"time"
)

// Slots is the number of slots. Two pods share one with a probability of 1/Slots.
const Slots = 60

// Slot returns the slot of a pod, which depends on its identity only.
func Slot(identity string) int {
	sum := sha256.Sum256([]byte("vipgate slot " + identity))
	return int(binary.BigEndian.Uint64(sum[:8]) % Slots)
}

// nextSlot returns now if the first half of the slot is not over, else the next start of the slot.
// Slots follow the wall clock: pods may get a new configuration at different times.
func nextSlot(now time.Time, slot int, length time.Duration) time.Time {
	cycle := Slots * length
	begin := now.Truncate(cycle).Add(time.Duration(slot) * length)
	switch {
	case now.Sub(begin) < 0:
		return begin
	case now.Sub(begin) < length/2:
		return now
	}
	return begin.Add(cycle)
}
