package cli

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/alecthomas/kong"
)

type testLine struct {
	Run struct {
		Lease time.Duration
		Drain time.Duration
		Port  uint16
	} `cmd:"" default:"withargs"`
	Status struct{} `cmd:""`
	Target struct {
		List struct{} `cmd:""`
	} `cmd:""`
}

func testParser(t *testing.T) *kong.Kong {
	t.Helper()
	k, err := New(Program{Name: "test"}, &testLine{})
	if err != nil {
		t.Fatal(err)
	}
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
			if err == nil || !strings.Contains(err.Error(), w) {
				t.Errorf("%s: got %v, want %q", line, err, w)
			}
		}
	}
}

func TestVariablesAreNamed(t *testing.T) {
	t.Setenv("VIPGATE_LEASE", "1s")
	t.Setenv("VIPGATE_PORT", "1")
	parsed, err := parse(testParser(t), strings.Fields("run --port=2"))
	if err != nil {
		t.Fatal(err)
	}
	p := Program{adopted: map[string]string{"VIPGATE_LEASE": "NFE_LEASE"}}
	got := p.nameVariables(parsed, "--lease=1s is bad\n--port=2 is bad\nnothing")
	if want := "--lease=1s is bad (--lease is set by NFE_LEASE)\n--port=2 is bad\nnothing"; got != want {
		t.Errorf("got %q", got)
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
