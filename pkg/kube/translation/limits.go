package translation

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
)

// minInterval is the least interval of checks in an annotation, because all tenants share lb.
const minInterval = 100 * time.Millisecond

// operatorFields lists the fields of a check that only writers of the Trench have. With them the
// owner of a Service would send lb's requests into other networks, and read the files of lb.
var operatorFields = []string{"via", "source", "caFile", "certFile", "keyFile"}

// refuseCheck returns why a Service may not have a check, or a part of it; nil if it may. The check
// is valid otherwise.
func refuseCheck(part any, path string) (refused *refusal) {
	switch part := part.(type) {
	case []any:
		for i, item := range part {
			if refused = refuseCheck(item, fmt.Sprintf("%s[%d]", path, i)); refused != nil {
				return refused
			}
		}
	case map[string]any:
		for _, key := range slices.Sorted(maps.Keys(part)) {
			field := strings.TrimPrefix(path+"."+key, ".")
			text, _ := part[key].(string)
			interval, err := time.ParseDuration(text)
			switch {
			case slices.Contains(operatorFields, key):
				return refuse(ReasonInvalidAnnotation, "annotation %s: %s: a Service cannot have it: remove it, or let "+
					"spec.defaults.check or a stream of spec.streams of the Trench have it", v1alpha1.CheckAnnotation, field)
			case (key == "interval" || key == "fastInterval") && err == nil && interval < minInterval:
				return refuse(ReasonInvalidAnnotation, "annotation %s: %s: is %s, and a Service has %s at least: write more, "+
					"or let spec.defaults.check of the Trench have it", v1alpha1.CheckAnnotation, field, text, minInterval)
			}
			if refused = refuseCheck(part[key], field); refused != nil {
				return refused
			}
		}
	}
	return nil
}
