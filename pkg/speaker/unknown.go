package speaker

import "errors"

// ErrUnknown reports that a View cannot find out which routes the speaker sends.
var ErrUnknown = errors.New("the speaker does not report which routes it sends")
