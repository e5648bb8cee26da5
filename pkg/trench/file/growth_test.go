package file_test

import (
	"bytes"
	"testing"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/trench/file"
	"github.com/vipgate/vipgate/test/growth"
)

// Also of files that are refused, with as many problems.
func TestGrowth(t *testing.T) {
	for _, dimension := range growth.Dimensions {
		prepare := func(n int) []byte { return file.Marshal(dimension.Of(n).Trench()) }
		few, many := dimension.Few/3, dimension.Many
		growth.Check(t, "write "+dimension.Name, few, many, func(t *testing.T, n int) func() {
			config := dimension.Of(n).Trench()
			return func() { file.Marshal(config) }
		})
		growth.Check(t, "read "+dimension.Name, few, many, func(t *testing.T, n int) func() {
			data := prepare(n)
			return func() {
				if _, err := file.Parse("f", data, trench.DefaultDefaults()); err != nil {
					t.Fatal(err)
				}
			}
		})
		growth.Check(t, "refuse "+dimension.Name, few, many, func(t *testing.T, n int) func() {
			// Addresses and prefixes of another form, and each of them in a field of its own.
			data := bytes.ReplaceAll(bytes.ReplaceAll(prepare(n), []byte("/32"), []byte("/x")), []byte("10.1."), []byte("10.x."))
			return func() {
				_, err := file.Parse("f", data, trench.DefaultDefaults())
				if err == nil {
					t.Fatal("not refused")
				}
				_ = err.Error()
			}
		})
	}
}
