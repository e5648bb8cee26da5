package pods

import (
	"bytes"
	"context"
	"fmt"
	"path"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
)

// collectTimeout bounds one file of a sysdump.
const collectTimeout = 30 * time.Second

// File is a file of a sysdump.
type File struct {
	Name    string
	Content []byte
}

// kernelDump is the command that prints the kernel's state of a program's network namespace.
const kernelDump = "dump"

// commands lists the commands of each program by the name of the file with their output. None
// prints secrets other than those of checks, which are masked.
var commands = map[string]map[string]string{
	Frontend: {
		"status.txt": "status", "status.json": "status --output=json", "events.json": "events --output=json",
		"bird.conf": "render", "kernel.txt": kernelDump, "version.txt": "version",
	},
	LB: {
		"status.txt": "status", "status.json": "status --output=json", "events.json": "events --output=json",
		"kernel.txt": kernelDump, "version.txt": "version",
	},
	Kube: {"status.txt": "status", "status.json": "status --output=json", "version.txt": "version"},
}

// Sysdump collects the output of all programs, and from a [Cluster] logs and manifests, in files
// without secrets. A file that cannot be collected has the reason.
func Sysdump(ctx context.Context, source Source) ([]File, error) {
	members, err := source.Members(ctx)
	if err != nil {
		return nil, err
	}
	c := &collector{}
	c.group.SetLimit(parallel)
	for _, member := range members {
		for program, reason := range member.Programs {
			for name, command := range commands[program] {
				c.add(ctx, path.Join(member.Name, program, name), func(ctx context.Context, out *bytes.Buffer) error {
					if reason != "" {
						return fmt.Errorf("%s", reason)
					}
					return source.Run(ctx, member.Name, program, append([]string{program}, strings.Fields(command)...), out)
				})
			}
		}
	}
	secrets := &masker{replaced: map[string]string{}}
	if cluster, is := source.(*Cluster); is {
		cluster.collect(ctx, c, secrets)
	}
	_ = c.group.Wait() // the functions return no error
	secrets.finish(c.files)
	return c.files, ctx.Err()
}

// collector collects files in parallel.
type collector struct {
	group errgroup.Group
	mu    sync.Mutex
	files []File
}

// add collects a file. Partial content precedes the reason of a failure.
func (c *collector) add(ctx context.Context, name string, read func(context.Context, *bytes.Buffer) error) {
	c.group.Go(func() error {
		ctx, cancel := context.WithTimeout(ctx, collectTimeout)
		defer cancel()
		var out bytes.Buffer
		if err := read(ctx, &out); err != nil {
			fmt.Fprintf(&out, "\n# sysdump: %v\n", err)
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		c.files = append(c.files, File{Name: name, Content: out.Bytes()})
		return nil
	})
}
