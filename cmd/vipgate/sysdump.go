package main

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/pkg/pods"
)

type sysdumpCommand struct {
	File string `arg:"" optional:"" type:"path" help:"The archive; when absent vipgate-sysdump-TIME.tar.gz."`
}

func (c *sysdumpCommand) Run(ctx context.Context, out *cli.Output, line *commandLine) (err error) {
	source, err := line.source()
	if err != nil {
		return err
	}
	files, err := pods.Sysdump(ctx, source)
	if err != nil {
		return err
	}
	now := time.Now().UTC()
	name := "vipgate-sysdump-" + now.Format("20060102T150405Z")
	if c.File == "" {
		c.File = name + ".tar.gz"
	}
	// Only the user may read addresses and names.
	file, err := os.OpenFile(c.File, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("failed to create the archive: %w", err)
	}
	if err := errors.Join(writeArchive(file, name, now, files), file.Close()); err != nil {
		return fmt.Errorf("failed to write %s: %w", c.File, err)
	}
	out.Printf("%s: %d files\n", c.File, len(files))
	return nil
}

// writeArchive writes files below a folder as tar.gz, ordered by name.
func writeArchive(w io.Writer, folder string, now time.Time, files []pods.File) error {
	slices.SortFunc(files, func(a, b pods.File) int { return strings.Compare(a.Name, b.Name) })
	compressed := gzip.NewWriter(w)
	archive := tar.NewWriter(compressed)
	for _, file := range files {
		header := &tar.Header{
			Name: path.Join(folder, file.Name), Mode: 0o600, Size: int64(len(file.Content)), ModTime: now,
		}
		if err := archive.WriteHeader(header); err != nil {
			return err
		}
		if _, err := archive.Write(file.Content); err != nil {
			return err
		}
	}
	return errors.Join(archive.Close(), compressed.Close())
}
