package main

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/pkg/dataplane"
	"github.com/vipgate/vipgate/test/harness"
)

// runLine parses the flags of lb run.
func runLine(t *testing.T, args ...string) (*runFlags, error) {
	t.Helper()
	k := parser(t)
	if _, err := k.Parse(append([]string{"run", "--frontend-id=spiffe://example.org/frontend"}, args...)); err != nil {
		return nil, err
	}
	f := &k.Model.Target.Addr().Interface().(*commandLine).Run.runFlags
	var refused cli.Refusals
	f.check(&refused)
	return f, refused.Err()
}

func TestInvalidDataPlaneFlags(t *testing.T) {
	for line, want := range map[string]string{
		"--dataplane=ebpf":                           "must be one of",
		"--conntrack=maybe":                          "must be one of",
		"--mark-mask=0":                              "write ones from the lowest bit on",
		"--mark-mask=0xff0000":                       "write ones from the lowest bit on",
		"--mark-mask=all":                            "expected a valid 32 bit uint",
		"--mark-mask=0x1ffffffff":                    "expected a valid 32 bit uint",
		"--conntrack=loose --mark-mask=0xffffffff":   "--conntrack=loose needs the highest bit",
		"--first-table=254":                          "at least 256",
		"--first-table=5000 --mark-mask=0x0fff":      "leaves less than 1000 numbers",
		"--first-table=65000 --mark-mask=0xffff":     "leaves less than 1000 numbers",
		"--dataplane-priority=0":                     "1 to 32763",
		"--dataplane-priority=32764":                 "1 to 32763",
		"--dataplane=nftables --stale-grace=-1s":     "must not be negative",
		"--dataplane=nftables --dataplane-priority=": "expected",
		"--dataplane=fastpath-required":              "needs --conntrack=off",
		"--log-level=loud":                           "--log-level: ",
	} {
		t.Run(line, func(t *testing.T) {
			_, err := runLine(t, strings.Fields(line)...)
			harness.WantError(t, err, want)
		})
	}
}

func TestNumberBounds(t *testing.T) {
	for _, line := range []string{
		"", "--first-table=256 --mark-mask=0xfff", "--dataplane-priority=1", "--dataplane-priority=32763",
		"--conntrack=off --first-table=256 --mark-mask=0x7ff",
		"--first-table=8000000", "--conntrack=off --first-table=16000000",
	} {
		if _, err := runLine(t, append(strings.Fields(line), "--dataplane=nftables")...); err != nil {
			t.Errorf("%s: %v", line, err)
		}
	}
}

func TestFlagsOfTheDataPlaneBecomeOptions(t *testing.T) {
	f, err := runLine(t)
	harness.Must(t, err)
	if o := f.dataPlaneFlags.options(); o != nil || f.staleGrace() != 0 {
		t.Errorf("without a data plane there are %+v and a grace of %v", o, f.staleGrace())
	}
	f, err = runLine(t, "--dataplane=nftables")
	harness.Must(t, err)
	want := dataplane.Config{
		First: dataplane.DefaultFirst, Mask: dataplane.DefaultMask,
		Priority: dataplane.DefaultPriority,
	}
	if o := f.dataPlaneFlags.options(); o.Config != want || f.staleGrace() != 5*time.Second {
		t.Errorf("options %+v, grace %v", *o, f.staleGrace())
	}
	f, err = runLine(t, strings.Fields("--dataplane=nftables --conntrack=loose --first-table=5300 --mark-mask=0xffff "+
		"--dataplane-priority=50 --stale-grace=0s")...)
	harness.Must(t, err)
	want = dataplane.Config{First: 5300, Mask: 0xffff, Priority: 50, Conntrack: dataplane.ConntrackLoose}
	if o := f.dataPlaneFlags.options(); o.Config != want || f.staleGrace() != 0 {
		t.Errorf("options %+v, grace %v", *o, f.staleGrace())
	}
}

func TestFastPathFlags(t *testing.T) {
	for line, want := range map[string]dataplane.FastPath{
		"--dataplane=nftables --conntrack=off":          dataplane.FastPathOff,
		"--dataplane=fastpath":                          dataplane.FastPathAuto,
		"--dataplane=fastpath-required --conntrack=off": dataplane.FastPathRequired,
	} {
		f, err := runLine(t, strings.Fields(line)...)
		if err != nil {
			t.Errorf("%s: %v", line, err)
			continue
		}
		if got := f.dataPlaneFlags.options().FastPath; got != want || f.staleGrace() != dataPlaneGrace {
			t.Errorf("%s: fast path %d, grace %v", line, got, f.staleGrace())
		}
	}
}

func TestKernelProblemsHaveRemedies(t *testing.T) {
	harness.Check(t, refuse(nil))
	err := refuse([]dataplane.Problem{
		{Object: "net.ipv4.ip_forward", Detail: "is 0", Remedy: "sysctl -w net.ipv4.ip_forward=1"}, {
			Object: "nft_hash",
			Detail: "is missing",
		},
	})
	want := "the data plane cannot work here:\n  net.ipv4.ip_forward: is 0\n    remedy: sysctl -w " +
		"net.ipv4.ip_forward=1\n  nft_hash: is missing"
	var usage *cli.UsageError
	if !errors.As(err, &usage) || err.Error() != want {
		t.Errorf("got %v", err)
	}
}

// A duration of zero must not mean a hold without an end.
func TestHoldDurationIsPositive(t *testing.T) {
	for _, d := range []time.Duration{0, -time.Second} {
		harness.WantError(t, (&holdCommand{For: &d}).Run(t.Context(), nil), "--for="+d.String()+": it must be positive")
	}
}
