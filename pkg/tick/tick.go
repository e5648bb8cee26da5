package tick

import "time"

// Until returns the time from now until the next instant that is a multiple of every by the wall
// clock, so that processes of one pod share their wake-ups, too. It is between an eighth and nine
// eighths of every: a timer that fires a little early, since the wall clock is being adjusted, does
// not fire twice.
func Until(now time.Time, every time.Duration) time.Duration {
	wait := every - time.Duration(now.UnixNano()%int64(every))
	if wait < every/8 {
		wait += every
	}
	return wait
}
