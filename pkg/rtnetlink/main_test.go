package rtnetlink

import "github.com/vipgate/vipgate/test/harness"

var must = harness.Must
