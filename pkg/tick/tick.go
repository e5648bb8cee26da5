package tick

import "time"

// Until returns the time from now until the next instant that is a multiple of every by the wall
// clock, so that processes of one pod share their wake-ups, too. It is between an eighth and nine
// eighths of every: a timer that fires a little early, since the wall clock is being adjusted, does
// not fire twice.
func Until(now time.Time, every time.Duration) time.Duration { return UntilPart(now, every, 1) }

// UntilPart is Until for the instants that divide each multiple of whole into equal parts. A third
// of a second is no whole number of nanoseconds, and Until would leave the seconds.
func UntilPart(now time.Time, whole time.Duration, parts int) time.Duration {
	n := time.Duration(parts)
	since := time.Duration(now.UnixNano() % int64(whole))
	next := since*n/whole + 1
	wait := next*whole/n - since
	if wait < whole/n/8 {
		wait = (next+1)*whole/n - since
	}
	return wait
}
