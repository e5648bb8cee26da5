package cli

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/alecthomas/kong"

	"github.com/vipgate/vipgate/test/harness"
)

type testLine struct {
	Run struct {
		Lease time.Duration
		Drain time.Duration
		Port  uint16
		Log   string `enum:"text,json" default:"text"`
		Mode  string `enum:"a,b" default:"a"`
	} `cmd:"" default:"withargs"`
	Status struct{} `cmd:""`
	Target struct {
		List struct{} `cmd:""`
	} `cmd:""`
}

func testParser(t *testing.T) *kong.Kong {
	t.Helper()
	k, err := New(Program{Name: "test"}, &testLine{})
	harness.Must(t, err)
	return k
}

func TestParseSaysWhatIsWrong(t *testing.T) {
	t.Setenv("VIPGATE_PORT", "many")
	for line, want := range map[string][]string{
		"stauts":                        {`unexpected argument stauts, did you mean "status"?`},
		"target lsit":                   {`unexpected argument lsit, did you mean "list"?`},
		"nonsense":                      {"unexpected argument nonsense"},
		"run --leese=1s":                {`unknown flag --leese, did you mean "--lease"?`},
		"run --lease=x --drain=y":       {"--lease: ", "--drain: ", `VIPGATE_PORT="many"`},
		"--drain=y --nothing=1":         {"--drain: ", "unknown flag --nothing"},
		"run --lease=1s --drain=minute": {"--drain: "},
	} {
		_, err := parse(testParser(t), strings.Fields(line))
		for _, w := range want {
			harness.WantError(t, err, w)
		}
	}
}

// A value may look like an error about a variable, which is set or not.
func TestValueLikeAnError(t *testing.T) {
	t.Setenv("VIPGATE_OTHER", "x")
	_, err := parse(testParser(t), []string{
		"run", "--lease=(from envar VIPGATE_NONE=", "--drain=(from envar VIPGATE_OTHER=",
	})
	harness.WantError(t, err, "--lease: ")
	harness.WantError(t, err, "--drain: ")
}

func TestEnumErrorsNameVariables(t *testing.T) {
	t.Setenv("VIPGATE_LOG", "x")
	t.Setenv("VIPGATE_MODE", "y")
	t.Setenv("VIPGATE_LEASE", "1")
	_, err := parse(testParser(t), []string{"run"})
	for _, want := range []string{
		`--log must be one of "text","json" but got "x" (from envar VIPGATE_LOG="x")`,
		`(from envar VIPGATE_MODE="y")`, `(from envar VIPGATE_LEASE="1")`,
	} {
		harness.WantError(t, err, want)
	}
	for _, name := range []string{"VIPGATE_LOG", "VIPGATE_MODE", "VIPGATE_LEASE"} {
		harness.Must(t, os.Unsetenv(name))
	}
	if _, err = parse(testParser(t), strings.Fields("run --log=z")); err == nil ||
		err.Error() != `--log must be one of "text","json" but got "z"` {
		t.Errorf("got %v", err)
	}
}

func TestVariablesAreNamed(t *testing.T) {
	t.Setenv("VIPGATE_LEASE", "1s")
	t.Setenv("VIPGATE_PORT", "1")
	parsed, err := parse(testParser(t), strings.Fields("run --port=2"))
	harness.Must(t, err)
	p := Program{adopted: map[string]string{"VIPGATE_LEASE": "NFE_LEASE"}}
	got := p.nameVariables(parsed, "--lease=1s is bad\n--port=2 is bad\nnothing")
	if want := "--lease=1s is bad (--lease is set by NFE_LEASE)\n--port=2 is bad\nnothing"; got != want {
		t.Errorf("got %q", got)
	}
}

func TestWithin(t *testing.T) {
	for value, want := range map[time.Duration]string{
		-1: "--e=-1ns must not be negative", time.Second - 1: "--e=999.999999ms: at least 1s", time.Second: "",
		time.Second + 1: "", time.Minute - 1: "", time.Minute: "", time.Minute + 1: "--e=1m0.000000001s: at most 1m0s",
	} {
		var r Refusals
		if r.Within("--e", value, time.Second, time.Minute); fmt.Sprint(errors.Join(r...)) != cmp.Or(want, "<nil>") {
			t.Errorf("%v: %v, want %q", value, r.Err(), want)
		}
	}
}

func TestRefusalsAreOneUsageError(t *testing.T) {
	var r Refusals
	if err := r.Err(); err != nil {
		t.Errorf("got %v", err)
	}
	r.Ports(Port{"--a", 1}, Port{"--b", 0}, Port{"--c", 1}, Port{"--d", 0})
	r.Within("--e", time.Minute, 0, time.Second)
	r.Add(nil)
	var usage *UsageError
	if err := r.Err(); !errors.As(err, &usage) ||
		err.Error() != "--a and --c are both 1: choose another port for one of them\n--e=1m0s: at most 1s" {
		t.Errorf("got %v", err)
	}
}
