package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/alecthomas/kong"

	"github.com/vipgate/vipgate/test/lab"
	"github.com/vipgate/vipgate/test/machine"
)

// Exit statuses.
const (
	exitMeasured = 0 // every row was
	exitFailed   = 1
	exitUsage    = 2
)

// options are the command line.
type options struct {
	Binaries     string  `help:"Folder of lb, frontend and meridio-lb." default:"bin" placeholder:"DIR"`
	Quick        bool    `help:"Few repeats and few VIPs: to see that it works, not for numbers."`
	Rows         []int   `help:"Measure these rows only." placeholder:"N,..."`
	VIPs         []int   `name:"vips" help:"Rows 1 and 2: measure with these numbers of VIPs only." placeholder:"N,..."`
	RepeatsScale float64 `help:"Multiply the number of repeats." default:"1.0" placeholder:"X"`
	JSON         string  `name:"json" help:"Write the results as JSON." placeholder:"FILE"`
	Samples      bool    `help:"Put every single value into the JSON."`
	CSV          string  `name:"csv" help:"Replace the measured rows in a CSV file, such as docs/performance.csv." placeholder:"FILE"`
	Document     string  `help:"Write the table of the CSV file into a document, such as docs/performance.md." placeholder:"FILE"`
	Plots        string  `help:"Draw rows 1 and 2 as SVG." placeholder:"DIR"`
	From         string  `help:"Measure nothing: write CSV and plots from the JSON of an earlier run." placeholder:"FILE"`
}

func main() {
	if len(os.Args) > 1 && os.Args[1] == fieldChecker {
		os.Exit(runFieldChecker(os.Args[2:], os.Stderr))
	}
	o, status, done := parse(os.Args[1:], os.Stdout, os.Stderr)
	if done {
		os.Exit(status)
	}
	os.Exit(run(o, os.Stdout, os.Stderr))
}

// parse reads the command line; done is true if the process should exit with status.
func parse(args []string, stdout, stderr io.Writer) (o options, status int, done bool) {
	parser, err := kong.New(&o, kong.Name("bench"), kong.Description(
		"Measures vipgate, and the field's common technique beside it.",
	),
		kong.Writers(stdout, stderr), kong.Exit(func(code int) { status, done = code, true }))
	if err == nil {
		_, err = parser.Parse(args)
	}
	if done { // --help
		return o, status, true
	}
	if err == nil {
		err = o.check()
	}
	if err != nil {
		fmt.Fprintf(stderr, "bench: %v\n", err)
		return o, exitUsage, true
	}
	return o, exitMeasured, false
}

func (o *options) check() error {
	if !(o.RepeatsScale > 0) {
		return fmt.Errorf("--repeats-scale=%v is not above 0", o.RepeatsScale)
	}
	if o.Document != "" && o.CSV == "" {
		return errors.New("--document needs --csv, the results to write into it")
	}
	if o.From != "" && o.Plots == "" && o.CSV == "" {
		return errors.New("--from needs --plots, the folder to draw into, or --csv")
	}
	for _, n := range o.Rows {
		if !slices.ContainsFunc(rows, func(r row) bool { return r.number == n }) {
			return fmt.Errorf("--rows: there is no row %d", n)
		}
	}
	return nil
}

// prepare makes the paths absolute and returns an error that names the missing programs.
func (o *options) prepare() error {
	if os.Geteuid() != 0 {
		return errors.New("network namespaces need root: run as root, or with sudo")
	}
	dir, err := filepath.Abs(o.Binaries)
	if err != nil {
		return err
	}
	o.Binaries = dir
	errs := lab.Missing()
	for _, program := range []string{"lb", "frontend", meridioLB} {
		if _, err := os.Stat(filepath.Join(dir, program)); err != nil {
			errs = append(errs, fmt.Errorf("%s is not built in %s: make build bench-tool", program, dir))
		}
	}
	return errors.Join(append(errs, lab.RemoveLeftovers())...)
}

// run measures and returns the exit status.
func run(o options, stdout, stderr io.Writer) int {
	if o.From != "" {
		r, err := loadReport(o.From)
		if err == nil {
			err = r.publish(&o, stdout)
		}
		if err != nil {
			fmt.Fprintf(stderr, "bench: %v\n", err)
			return exitFailed
		}
		return exitMeasured
	}
	if err := o.prepare(); err != nil {
		fmt.Fprintf(stderr, "bench: %v\n", err)
		return exitFailed
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	// A reader that goes away, such as head, must not end the benchmark with SIGPIPE before the lab
	// is removed. No goroutine reads this channel.
	pipes := make(chan os.Signal, 1)
	signal.Notify(pipes, syscall.SIGPIPE)
	defer signal.Stop(pipes)

	r := &report{Machine: machine.Describe(ctx, o.Binaries), Quick: o.Quick, LoadBefore: loadAverage()}
	measureRows(ctx, &session{
		quick: o.Quick, vips: o.VIPs, binaries: o.Binaries, repeatsScale: o.RepeatsScale, report: r,
		progress: func(text string) { fmt.Fprintln(stderr, text) },
	}, rows, o.Rows)
	r.LoadAfter = loadAverage()
	r.Seconds = time.Since(r.Date).Seconds()
	r.summarize()

	err := r.writeText(stdout)
	if o.JSON != "" {
		err = errors.Join(err, writeFile(o.JSON, func(w io.Writer) error { return r.writeJSON(w, o.Samples) }))
	}
	err = errors.Join(err, r.publish(&o, stderr))
	if err != nil {
		fmt.Fprintf(stderr, "bench: %v\n", err)
	}
	if err != nil || len(r.Failures) > 0 {
		return exitFailed
	}
	return exitMeasured
}

// publish updates the CSV file and draws the plots, as the options name them.
func (r *report) publish(o *options, output io.Writer) (err error) {
	if o.CSV != "" {
		err = r.updateCSV(o.CSV)
	}
	if o.Document != "" && err == nil {
		err = updateDocument(o.Document, o.CSV, true)
	}
	if o.Plots != "" {
		err = errors.Join(err, r.plot(o.Plots, output))
	}
	return err
}

// measureRows measures the selected rows, all when none is named. It continues after a row that
// fails.
func measureRows(ctx context.Context, s *session, rows []row, only []int) {
	for _, r := range rows {
		if len(only) > 0 && !slices.Contains(only, r.number) {
			continue
		}
		s.progress(fmt.Sprintf("row %d: %s", r.number, r.title))
		started := time.Now()
		err := ctx.Err()
		if err == nil {
			err = r.measure(ctx, s)
		}
		if err != nil {
			s.progress(fmt.Sprintf("row %d FAILED: %v", r.number, err))
			s.report.Failures = append(s.report.Failures, failure{Row: r.number, Error: err.Error()})
		}
		s.report.Rows = append(s.report.Rows,
			measuredRow{Row: r.number, Title: r.title, Seconds: time.Since(started).Seconds(), Load: loadAverage()})
	}
}

func writeFile(path string, write func(io.Writer) error) error {
	f, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("results: %w", err)
	}
	if err := errors.Join(write(f), f.Close()); err != nil {
		return fmt.Errorf("results in %s: %w", path, err)
	}
	return nil
}
