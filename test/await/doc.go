// Package await lets tests wait for a condition with a deadline instead of sleeping.
package await
