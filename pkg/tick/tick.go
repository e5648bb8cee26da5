package tick

import "time"

// Until returns the time from now until the next multiple of every on the wall clock, so that the
// processes of a pod share their wake-ups, too. The result is between 1/8 and 9/8 of every: a timer
// that fires slightly early, while the wall clock is adjusted, does not fire twice.
func Until(now time.Time, every time.Duration) time.Duration { return UntilPart(now, every, 1) }

// UntilPart is Until for the instants that divide each multiple of whole into equal parts. Until
// with a third of a second would drift from the full seconds, because a third of a second is not an
// integral number of nanoseconds.
func UntilPart(now time.Time, whole time.Duration, parts int) time.Duration {
	duration := time.Duration(parts)
	since := time.Duration(now.UnixNano() % int64(whole))
	next := since*duration/whole + 1
	wait := next*whole/duration - since
	if wait < whole/duration/8 {
		wait = (next+1)*whole/duration - since
	}
	return wait
}
