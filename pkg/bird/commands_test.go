package bird

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/vipgate/vipgate/pkg/bfdlease"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// BIRD 2 and BIRD 3 have different commands to request routes again.
func TestReloadAfterImportLimit(t *testing.T) {
	for version, reload := range map[string]string{"2.0.12": "reload in", "3.1.8": "reload filters in"} {
		synctest.Test(t, func(t *testing.T) {
			f := &fakeBIRD{up: true, version: version}
			f.garble = func(text string) string {
				return strings.Replace(text, "     Routes: 0", "     Import limit: 3 [HIT]\n     Routes: 3", 1)
			}
			w := watch(t, f, 3*time.Second)
			w.after(minReload + pollInterval)
			f.with(func() {
				if want := []string{reload + ` "NBR-a"`}; !slices.Equal(f.reloads, want) {
					t.Errorf("BIRD %s: commands %q, want %q", version, f.reloads, want)
				}
			})
		})
	}
}

// While BIRD loads a configuration, the lease covers the static gateways of the old and the new
// configuration; afterwards it covers only the new gateways.
func TestGatewaysDuringReconfiguration(t *testing.T) {
	ns := lab.NewNetNS(t)
	static := func(last byte) Session {
		return Session{Gateway: trench.Gateway{
			Address: netip.AddrFrom4([4]byte{192, 0, 2, last}), Protocol: trench.Static, BFD: &trench.BFD{},
		}}
	}
	listed := func() (gateways [2]bool) {
		text, err := ns.Run(t.Context(), "nft", "list", "set", "inet", bfdlease.TableName, "gateways4")
		harness.Check(t, err)
		return [2]bool{strings.Contains(text, "192.0.2.1"), strings.Contains(text, "192.0.2.2")}
	}
	f := &fakeBIRD{}
	defer f.wg.Wait()
	var during [2]bool
	f.configure = func() { during = listed() }
	s := NewSupervisor(Options{Dir: t.TempDir(), Socket: "unused"})
	s.dial, s.process = f.dial, &process{cmd: &exec.Cmd{Process: &os.Process{Pid: 42}}}
	defer s.disconnect()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- ns.Do(func() error { return s.lease.Run(ctx) }) }()
	defer func() { cancel(); <-ended }()
	s.apply.current.input.Sessions = []Session{static(1)}
	s.apply.pending.input.Sessions = []Session{static(2)}
	harness.Must(t, os.WriteFile(s.file.staged(), nil, 0o600))
	harness.Must(t, s.reconfigure(ctx))
	if after := listed(); during != [2]bool{true, true} || after != [2]bool{false, true} {
		t.Errorf("with a lease are %v while the configuration is loaded, and %v afterwards", during, after)
	}
}

// The supervisor does not request a list that exceeds the bound of replies.
func TestLongListOfExportsIsNotRead(t *testing.T) {
	s := NewSupervisor(Options{Dir: t.TempDir(), Socket: "unused"})
	s.dial = func(context.Context, string) (*Client, error) {
		t.Error("BIRD is asked")
		return nil, errors.New("unused")
	}
	g := &GatewayState{Exported: maxListed + 1, Announced: maxListed + 2, exports: exportList{vips: vip.Set{}}}
	if s.listExports(t.Context(), time.Now(), g); g.exports.vips != nil {
		t.Errorf("known are %v", g.exports.vips)
	}
}

// BIRD 2 and BIRD 3 have different commands to export routes again.
func TestExportRoutesCommand(t *testing.T) {
	for version, reload := range map[string]string{
		"2.0.12": "reload out", "2.20.0": "reload out", "3.1.8": "reload filters out",
	} {
		t.Run(version, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := &fakeBIRD{version: version}
				w := watch(t, f)
				w.ExportRoutes()
				synctest.Wait()
				want := []string{reload + ` "KERNEL4"`, reload + ` "KERNEL6"`}
				f.with(func() {
					if !slices.Equal(f.reloads, want) {
						t.Errorf("commands %q, want %q", f.reloads, want)
					}
				})
			})
		})
	}
}

// BIRD may be silent for its shortest hold time, within bounds. Static gateways have none.
func TestHangLimit(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		want   time.Duration
		static bool
		hold   []time.Duration // of BGP sessions, in seconds
	}{
		{minHang, false, nil},
		{minHang, true, nil},
		{minHang, false, []time.Duration{3}},
		{7 * time.Second, false, []time.Duration{90, 6}},
		{7 * time.Second, true, []time.Duration{6}},
		{maxHang, true, []time.Duration{9, 240}},
		{maxHang, false, []time.Duration{240}},
	} {
		var s Supervisor
		sessions := &s.apply.current.input.Sessions
		if c.static {
			*sessions = append(*sessions, Session{Gateway: trench.Gateway{Protocol: trench.Static}})
		}
		for _, hold := range c.hold {
			*sessions = append(*sessions, Session{Gateway: trench.Gateway{Protocol: trench.BGP, HoldTime: hold * time.Second}})
		}
		if got := s.apply.current.input.hangLimit(); got != c.want {
			t.Errorf("%+v: %v", c, got)
		}
	}
}
