package bird_test

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/vipgate/vipgate/test/harness"
)

// shardCount is the number of processes that share the tests. The tests mostly wait for timers of
// BGP, and those of one process run one after the other, in its network namespace.
const shardCount = 4

// shardFlags are the flags of test programs that mean the same for each part of the tests.
var shardFlags = []string{
	"test.count", "test.failfast", "test.paniconexit0", "test.parallel", "test.short", "test.testlogfile",
	"test.timeout", "test.v",
}

// runAll runs all tests in shards. With a flag that selects tests or writes a file it runs them in
// one process.
func runAll() int {
	whole := true
	flag.Visit(func(f *flag.Flag) { whole = whole && slices.Contains(shardFlags, f.Name) })
	if !whole || flag.NArg() > 0 {
		return runInside(os.Stdout, os.Args[1:]...)
	}
	var list bytes.Buffer
	if status := runInside(&list, "-test.list=^(Test|Fuzz|Example)"); status != 0 {
		fmt.Print(list.String())
		return status
	}
	names := strings.Fields(list.String())
	outputs, statuses := make([]bytes.Buffer, shardCount), make([]int, shardCount)
	var running sync.WaitGroup
	for i, shard := range divide(names, shardCount) {
		// The last one of equal flags is in force. This form of -v marks the results of tests, so that
		// output of a test cannot look like one.
		args := append(slices.Clone(os.Args[1:]), "-test.run=^("+strings.Join(shard, "|")+")$", "-test.v=test2json")
		if log := flagText("test.testlogfile"); log != "" {
			args = append(args, fmt.Sprintf("-test.testlogfile=%s.%d", log, i))
		}
		running.Go(func() { statuses[i] = runInside(&outputs[i], args...) })
	}
	running.Wait()

	status := max(slices.Max(statuses), mergeTestLogs())
	var results strings.Builder
	for i := range outputs {
		text := outputs[i].String()
		results.WriteString(text)
		switch {
		case flagText("test.v") == "test2json":
			fmt.Print(text)
		case flagText("test.v") == "true":
			fmt.Print(strings.ReplaceAll(text, resultMark, ""))
		case statuses[i] != 0:
			fmt.Print(failures(text))
		}
	}
	if err := ranOnce(names, results.String(), flagText("test.count")); err != nil && status == 0 {
		fmt.Println(err)
		status = 1
	}
	return status
}

func flagText(name string) string { return flag.Lookup(name).Value.String() }

// divide distributes names, of which neighbors take a similar time.
func divide(names []string, count int) [][]string {
	shards := make([][]string, count)
	for i, name := range names {
		shards[i%count] = append(shards[i%count], name)
	}
	return shards
}

// mergeTestLogs joins the shards' lists of the files and variables that Go's cache of test results
// depends on, and returns an exit status.
func mergeTestLogs() int {
	log := flagText("test.testlogfile")
	if log == "" {
		return 0
	}
	var all []byte
	var errs []error
	for i := range shardCount {
		part, err := os.ReadFile(fmt.Sprintf("%s.%d", log, i))
		header, lines, _ := bytes.Cut(part, []byte("\n"))
		if i == 0 {
			all = append(header, '\n')
		}
		all = append(all, lines...)
		errs = append(errs, err)
	}
	if err := errors.Join(append(errs, os.WriteFile(log, all, 0o600))...); err != nil {
		fmt.Println("list of the tests' files:", err)
		return 1
	}
	return 0
}

const resultMark = "\x16"

var (
	resultPattern  = regexp.MustCompile(resultMark + `--- (PASS|FAIL|SKIP): (\S+) \(`)
	sectionPattern = regexp.MustCompile(resultMark + `=== \w+ *([^\s/]*)`)
)

// ranOnce returns an error unless each test has one result for each of count runs.
func ranOnce(names []string, output, count string) error {
	results := map[string]int{}
	for _, match := range resultPattern.FindAllStringSubmatch(output, -1) {
		results[match[2]]++
	}
	var wrong []string
	for _, name := range names {
		if fmt.Sprint(results[name]) != count {
			wrong = append(wrong, fmt.Sprintf("%s: %d", name, results[name]))
		}
		delete(results, name)
	}
	for name, n := range results {
		if !strings.Contains(name, "/") {
			wrong = append(wrong, fmt.Sprintf("%s, which is not listed: %d", name, n))
		}
	}
	if len(wrong) > 0 {
		return fmt.Errorf("tests without %s results: %s", count, strings.Join(wrong, ", "))
	}
	return nil
}

// failures returns the output without that of tests that passed.
func failures(output string) string {
	passed := map[string]bool{}
	for _, match := range resultPattern.FindAllStringSubmatch(output, -1) {
		passed[match[2]] = match[1] != "FAIL"
	}
	var out strings.Builder
	current := ""
	for line := range strings.Lines(output) {
		if match := sectionPattern.FindStringSubmatch(line); match != nil {
			current = match[1]
			continue
		}
		if !passed[current] {
			out.WriteString(strings.ReplaceAll(line, resultMark, ""))
		}
	}
	return out.String()
}

func TestShards(t *testing.T) {
	names := []string{"TestA", "TestB", "TestC", "TestD", "TestE"}
	shards := divide(names, 2)
	if got := fmt.Sprint(shards); got != "[[TestA TestC TestE] [TestB TestD]]" {
		t.Errorf("shards %s", got)
	}
	result := func(word, name string) string {
		return fmt.Sprintf("%[1]s=== RUN   %[3]s\n    log of %[3]s\n%[1]s--- %[2]s: %[3]s (0.00s)\n",
			resultMark, word, name)
	}
	output := result("PASS", "TestA") + result("SKIP", "TestB") + result("FAIL", "TestC")
	if err := ranOnce(names[:3], output, "1"); err != nil {
		t.Error(err)
	}
	harness.WantError(t, ranOnce(names[:4], output, "1"), "TestD: 0")
	harness.WantError(t, ranOnce(names[:2], output, "1"), "TestC, which is not listed: 1")
	harness.WantError(t, ranOnce(names[:3], output+result("PASS", "TestA"), "1"), "TestA: 2")
	if got := failures(output); got != "    log of TestC\n--- FAIL: TestC (0.00s)\n" {
		t.Errorf("failures %q", got)
	}
}
