package e2e

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/vipgate/vipgate/test/lab"
)

// Invalid input is one error with file and line, and exit status 2 at the start; validate prints
// the same error without starting.
func TestCommandLines(t *testing.T) {
	t.Parallel()
	testscript.Run(t, testscript.Params{
		Dir:                "testdata/script",
		RequireUniqueNames: true,
		Setup: func(env *testscript.Env) error {
			// No variable of the tests' environment may replace a flag.
			env.Vars = slices.DeleteFunc(env.Vars, func(v string) bool {
				return strings.HasPrefix(v, "VIPGATE_") || strings.HasPrefix(v, "NFE_") ||
					strings.HasPrefix(v, "SPIFFE_")
			})
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"bad": scriptBad, "refused": scriptRefused,
			"valid": scriptValid, "warned": scriptWarned, "invalid": scriptInvalid,
			"validates": scriptValidates,
		},
	})
}

// usualFlags are valid flags that touch no file outside the script's folder; later flags override
// them.
func usualFlags(ts *testscript.TestScript, program, trench string) []string {
	flags := []string{
		"--trench-file=" + ts.MkAbs(trench), "--admin-socket=" + ts.MkAbs("admin.sock"),
		"--identity=dev", "--dev-authority-dir=" + ts.MkAbs("authority"), "--metrics-address=",
		"--health-address=127.0.0.1:1",
	}
	switch program {
	case "lb":
		flags = append(flags, "--socket="+ts.MkAbs("lb.sock"))
		if ts.Getenv("UNPRIVILEGED") == "" {
			flags = append(flags, "--frontend-id="+lab.FrontendID)
		}
	case "frontend":
		flags = append(flags, "--lb-socket="+ts.MkAbs("lb.sock"), "--external-interface=lo",
			"--bird-dir="+ts.MkAbs("bird"), "--bird-socket="+ts.MkAbs("bird.ctl"))
		if ts.Getenv("UNPRIVILEGED") == "" {
			flags = append(flags, "--lb-id="+lab.LBID)
		}
	default:
		ts.Fatalf("there is no program %q", program)
	}
	return flags
}

// offLink matches the warning about gateways that are not in a network of lo.
var offLink = regexp.MustCompile(`(?m)^frontend: warning: gateway \S+ has no session: interface lo: .*\n`)

// call runs a program and returns its output and exit status. It fails if the program created or
// changed a file.
func call(ts *testscript.TestScript, program, command string, flags []string) (stdout, stderr string, status int) {
	before := listing(ts)
	// A run that should be refused must not run forever.
	err := ts.Exec("timeout", append([]string{"20", filepath.Join(binaries, program), command}, flags...)...)
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		status = exit.ExitCode()
	} else {
		ts.Check(err)
	}
	if after := listing(ts); after != before {
		ts.Fatalf("%s %s left something behind; before:\n%safter:\n%s", program, command, before, after)
	}
	return ts.ReadFile("stdout"), ts.ReadFile("stderr"), status
}

// listing returns the name and modification time of every file in the script's folder.
func listing(ts *testscript.TestScript) string {
	var b strings.Builder
	ts.Check(filepath.WalkDir(ts.Getenv("WORK"), func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		b.WriteString(path + " " + info.ModTime().String() + "\n")
		return nil
	}))
	return b.String()
}

// refusal returns the error output of a refused start, which must be the same for each command.
func refusal(ts *testscript.TestScript, program string, flags []string, commands ...string) string {
	var said string
	for _, command := range commands {
		stdout, stderr, status := call(ts, program, command, flags)
		switch {
		case status != 2:
			ts.Fatalf("%s %s: exit status %d, want 2", program, command, status)
		case stdout != "":
			ts.Fatalf("%s %s printed an error, or more, to stdout: %s", program, command, stdout)
		case said != "" && stderr != said:
			ts.Fatalf("%s %s says %q, %s says %q", program, command, stderr, commands[0], said)
		}
		said = stderr
	}
	return said
}

func matches(ts *testscript.TestScript, pattern, text string) bool {
	re, err := regexp.Compile(pattern)
	ts.Check(err)
	return re.MatchString(text)
}

// scriptBad implements: bad LINE TEXT WHERE MESSAGE. TEXT may have several lines, separated by \n.
func scriptBad(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 4 {
		ts.Fatalf("usage: bad LINE TEXT WHERE MESSAGE")
	}
	line, err := strconv.Atoi(args[0])
	ts.Check(err)
	text := strings.Split(ts.ReadFile("good.yaml"), "\n")
	text[line-1] = strings.ReplaceAll(args[1], `\n`, "\n")
	bad := ts.MkAbs("bad.yaml")
	ts.Check(os.WriteFile(bad, []byte(strings.Join(text, "\n")), 0o644))
	for _, program := range []string{"lb", "frontend"} {
		said := refusal(ts, program, usualFlags(ts, program, "bad.yaml"), "validate") // run starts without VIPs
		want := "^" + program + ": trench file refused:\n" + regexp.QuoteMeta(bad) + ":" + args[2] + ": .*" + args[3] +
			".*\n$"
		if !matches(ts, want, said) {
			ts.Fatalf("%s says %q, want one error like %q", program, said, want)
		}
	}
}

// scriptRefused implements: refused PROGRAM MESSAGE FLAG...
func scriptRefused(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: refused PROGRAM MESSAGE FLAG...")
	}
	program := args[0]
	commands := []string{"run", "validate"}
	if slices.ContainsFunc(args[2:], func(a string) bool { return strings.HasPrefix(a, "--trench-file=") }) {
		commands = commands[1:] // run starts without VIPs
	}
	said := refusal(ts, program, append(usualFlags(ts, program, "good.yaml"), args[2:]...), commands...)
	// For a flag that it cannot parse the parser refers to --help.
	want := "^" + program + ": (trench file refused:\n)?.*(" + args[1] + ").*\n(Try '" + program + " --help'.\n)?$"
	if !matches(ts, want, said) {
		ts.Fatalf("%s says %q, want one error like %q", program, said, want)
	}
}

// scriptValid implements: valid PROGRAM FLAG...
func scriptValid(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 1 {
		ts.Fatalf("usage: valid PROGRAM FLAG...")
	}
	stdout, stderr, status := call(ts, args[0], "validate", append(usualFlags(ts, args[0], "good.yaml"), args[1:]...))
	stderr = offLink.ReplaceAllString(stderr, "")
	if want := ts.MkAbs("good.yaml") + ": valid\n"; status != 0 || stdout != want || stderr != "" {
		ts.Fatalf("validate: exit status %d, %q, %q; want %q", status, stdout, stderr, want)
	}
}

// scriptWarned implements: warned PROGRAM MESSAGE FLAG... Input whose validity depends on the host
// is accepted with a warning.
func scriptWarned(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: warned PROGRAM MESSAGE FLAG...")
	}
	program := args[0]
	stdout, stderr, status := call(ts, program, "validate", append(usualFlags(ts, program, "good.yaml"), args[2:]...))
	if want := ts.MkAbs("good.yaml") + ": valid\n"; status != 0 || stdout != want ||
		!matches(ts, "(?m)^"+program+": warning: .*"+args[1], stderr) {
		ts.Fatalf("validate: exit status %d, %q, %q; want a warning like %q", status, stdout, stderr, args[1])
	}
}

// scriptInvalid implements: invalid PROGRAM MESSAGE FLAG... Input that a running program may
// receive later is only refused by validate.
func scriptInvalid(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: invalid PROGRAM MESSAGE FLAG...")
	}
	program := args[0]
	stdout, stderr, status := call(ts, program, "validate", append(usualFlags(ts, program, "good.yaml"), args[2:]...))
	if status != 2 || stdout != "" || !matches(ts, "^"+program+": "+args[1], stderr) {
		ts.Fatalf("validate: exit status %d, %q, %q; want a refusal like %q", status, stdout, stderr, args[1])
	}
}

// scriptValidates implements: validates STATUS OUTPUT PROGRAM ARGUMENT... No flag or variable is
// set, as in CI. OUTPUT is a file with the expected output.
func scriptValidates(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 3 {
		ts.Fatalf("usage: validates STATUS OUTPUT PROGRAM ARGUMENT...")
	}
	// The programs run in the script's folder, so the output has the names of the script.
	stdout, stderr, status := call(ts, args[2], "validate", args[3:])
	if want := ts.ReadFile(args[1]); strconv.Itoa(status) != args[0] || stdout+stderr != want {
		ts.Fatalf("validate: exit status %d, want %s:\n%s%s\nwant\n%s", status, args[0], stdout, stderr, want)
	}
}

// A refused trench file leaves the previous one in force; log, metric and event report it
// (docs/architecture.md#failure-table).
func TestInvalidTrenchFileIsIgnored(t *testing.T) {
	t.Parallel()
	f := newServing(t, 2)
	mark, lbFrom, from := f.mark(), length(f.pod.LB), length(f.pod.Frontend)
	const refused = `vipgate_configuration_reloads_total{result="refused"}`
	before := metric(t, f.get(lab.FrontendMetrics, "/metrics"), refused)

	bad := strings.Replace(usualTrench(), "name: attractor-a-1", "name: attractor-a-1\n  vip: 20.0.0.1/32", 1)
	f.must(f.pod.WriteTrench(bad))
	where := f.pod.TrenchFile() + `:4: attractor.vip: unknown field, did you mean "vips"`
	f.waitFrontend("Configuration", false, where)
	f.waitLB("Configuration", false, where)
	logged := strings.ReplaceAll(where, `"`, `\"`)
	f.waitLine(f.pod.LB, lbFrom, logged)
	f.waitLine(f.pod.Frontend, from, logged)
	// Otherwise one invalid edit would make every pod of the trench not ready.
	for _, addr := range []string{lab.FrontendHealth, lab.LBHealth} {
		f.wantHealth(addr, "Readiness", healthv1.HealthCheckResponse_SERVING)
	}
	page := f.get(lab.FrontendMetrics, "/metrics")
	if got := metric(t, page, refused); got <= before {
		t.Errorf("%s is %v, it was %v", refused, got, before)
	}
	if got := metric(t, page, "vipgate_configuration_valid"); got != 0 {
		t.Errorf("vipgate_configuration_valid is %v, want 0", got)
	}
	if out, code := f.run("frontend", "events", "--admin-socket=unix://"+f.pod.FrontendAdmin()); code != 0 ||
		!strings.Contains(out, where) {
		t.Errorf("frontend events: exit status %d, want the refusal in it: %s", code, out)
	}

	// The previous file is in force for targets, too.
	f.down(f.target2)
	f.wantRoutes(vipA4, vipA6)
	f.up(f.target2)
	f.wantRoutes(every()...)
	f.must(f.pod.WriteTrench(usualTrench()))
	f.waitFrontend("Configuration", true)
	f.waitLB("Configuration", true)
	f.wantHealth(lab.FrontendHealth, "Readiness", healthv1.HealthCheckResponse_SERVING)
	f.wantNoUpdates(mark, vipA4, vipA6)
	f.wantRunning(f.pod.LB, f.pod.Frontend)
}
