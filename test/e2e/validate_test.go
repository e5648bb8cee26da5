package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

// validate --diff shows an edit before it happens, compared with the configuration in force, of
// which a file that was refused since is no part.
func TestValidateDiff(t *testing.T) {
	t.Parallel()
	f := newServing(t, 2)
	f.must(f.pod.WriteTrench("refused"))
	f.waitFrontend("Configuration", false)
	f.waitLB("Configuration", false)

	next := filepath.Join(f.Dir, "next.yaml")
	text := edited(t, fmt.Sprintf("vips: [%s, %q, %s, %q]", vipA4, vipA6, vipB4, vipB6),
		fmt.Sprintf("vips: [%s, %q, %s, %q, 20.0.0.9/32]", vipA4, vipA6, vipB4, vipB6),
		lineA6, with("holdTime: 9s", lineA6)[0],
		"name: stream-b", "name: stream-c", "name: target-1", "name: target-9")
	f.must(os.WriteFile(next, []byte(text), 0o644))
	want := next + `: valid
+ VIP 20.0.0.9/32
~ gateway gateway-a6: session restarts (holdTime)
+ stream stream-c
- stream stream-b
~ stream stream-a: table changes (targets: 0 added, 0 removed)
sessions restart one after another, each in about 2s: 2s in all
`
	for program, socket := range map[string]string{"lb": f.pod.LBAdmin(), "frontend": f.pod.FrontendAdmin()} {
		out, code := f.run(program, "validate", "--diff", "--admin-socket=unix://"+socket, next)
		if code != 0 || out != want {
			t.Errorf("%s: exit status %d\n%swant\n%s", program, code, out, want)
		}
	}
	// Nothing happened.
	f.wantRoutes(every()...)
}
