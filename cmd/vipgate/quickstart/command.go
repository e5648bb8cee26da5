package quickstart

import (
	"context"
	_ "embed" // guide.txt
	"errors"
	"fmt"
	"net/http"
	"os"
	"time"

	"github.com/vipgate/vipgate/cmd/internal/cli"
)

// timeout bounds the creation and the removal.
const timeout = time.Minute

// Command is `vipgate quickstart`.
type Command struct {
	Down  bool   `help:"Remove the laboratory: its processes, namespaces and files." env:"-"`
	Serve string `hidden:"" env:"-"`
}

// Run creates or removes the laboratory.
func (c *Command) Run(ctx context.Context, out *cli.Output) error {
	if c.Serve != "" {
		return serve(c.Serve)
	}
	if os.Geteuid() != 0 {
		return errors.New("network namespaces need root: run it as root, or with sudo")
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if c.Down {
		return down(ctx)
	}
	if err := up(ctx); err != nil {
		return errors.Join(fmt.Errorf("failed to create the laboratory: %w", err), down(ctx))
	}
	out.Printf("%s", guide)
	return nil
}

//go:embed guide.txt
var guide string

// serve answers requests with the name of the target.
func serve(name string) error {
	server := &http.Server{
		Addr: ":5000", ReadHeaderTimeout: time.Second,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, name) }),
	}
	return server.ListenAndServe()
}
