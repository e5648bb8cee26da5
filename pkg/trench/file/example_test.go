package file_test

import (
	"errors"
	"fmt"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/trench/file"
)

const example = `
trench: trench-a
attractor:
  name: attractor-a
  vips: [20.0.0.1/32]
  gateways:
    - {name: gateway-a, address: 169.254.100.150}
streams:
  - name: stream-a
    vips: [20.0.0.1/32]
    check: {tcp: {port: 5000}}
    targets:
      - {name: target-1, ips: [172.16.1.1]}
`

// Omitted fields have their defaults.
func ExampleParse() {
	c, err := file.Parse("trench.yaml", []byte(example), trench.DefaultDefaults())
	if err != nil {
		fmt.Println(err)
		return
	}
	g, s := c.Attractor.Gateways[0], c.Streams[0]
	fmt.Printf("%s: AS %d, hold time %s\n", g.Name, g.RemoteASN, g.HoldTime)
	fmt.Printf("%s: %d target, checked every %s\n", s.Name, len(s.Targets), s.Check.Interval)
	// Output:
	// gateway-a: AS 4248829953, hold time 3s
	// stream-a: 1 target, checked every 1s
}

// A file is rejected with all of its problems, each with position and remedy.
func ExampleParse_refused() {
	_, err := file.Parse("trench.yaml", []byte(`
trench: trench-a
attractor:
  name: attractor-a
  vips: [20.0.0.1/24]
  gateways:
    - {name: gateway-a, address: 169.254.100.150, holdTime: 1s}
`), trench.DefaultDefaults())
	var refused *file.Errors
	if errors.As(err, &refused) {
		for _, p := range refused.Problems {
			fmt.Printf("line %d: %s\n", p.Line, p.Field)
		}
	}
	// Output:
	// line 5: attractor.vips[0]
	// line 7: attractor.gateways[0].holdTime
}
