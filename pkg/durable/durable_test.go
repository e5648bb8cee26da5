package durable

import (
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// document is the content of a state file.
type document struct {
	Name string `json:"name"`
}

func writeFile(t *testing.T, path, content string, mode fs.FileMode) {
	t.Helper()
	harness.Must(t, os.WriteFile(path, []byte(content), mode))
	if err := os.Chmod(path, mode); err != nil { // without the umask
		t.Fatal(err)
	}
}

func wantFile(t *testing.T, path, content string, mode fs.FileMode) {
	t.Helper()
	data, err := os.ReadFile(path)
	harness.Must(t, err)
	info, err := os.Stat(path)
	harness.Must(t, err)
	if string(data) != content || info.Mode() != mode {
		t.Errorf("%s has %d bytes with mode %v, want %d with %v", path, len(data), info.Mode(), len(content), mode)
	}
}

func TestReplace(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	for _, mode := range []fs.FileMode{0o600, 0o644, 0o640, 0o666} {
		harness.Must(t, Replace(path, []byte("content"), mode))
		wantFile(t, path, "content", mode) // includes the bits that the umask clears
	}
	// Neither the content nor the mode of a killed process's temporary file is reused.
	writeFile(t, path+temporarySuffix, "longer than the content", 0o644)
	harness.Must(t, Replace(path, []byte("secret"), 0o600))
	wantFile(t, path, "secret", 0o600)
	if entries, err := os.ReadDir(filepath.Dir(path)); err != nil || len(entries) != 1 {
		t.Errorf("left over: %v, %v", entries, err)
	}
}

// A secret is never readable by other users, even if the temporary file of a killed process is
// readable or open in another process.
func TestSecretIsNeverReadable(t *testing.T) {
	path := filepath.Join(t.TempDir(), "key")
	writeFile(t, path+temporarySuffix, "", 0o644)
	reader, err := os.Open(path + temporarySuffix)
	harness.Must(t, err)
	defer reader.Close()
	harness.Must(t, Replace(path, []byte("secret"), 0o600))
	if data, err := io.ReadAll(reader); err != nil || len(data) > 0 {
		t.Errorf("another process reads %q, %v", data, err)
	}
	wantFile(t, path, "secret", 0o600)
}

// After any failure the old file is complete, and no other file remains.
func TestFailedWriteLeavesTheOldFile(t *testing.T) {
	const old, size = "old content", 256 << 10
	for name, prepare := range map[string]func(t *testing.T, dir string){
		"full disk": func(t *testing.T, dir string) {
			if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"); err != nil {
				lab.Skip(t, "the mount of a tmpfs: "+err.Error())
			}
			t.Cleanup(func() { harness.Must(t, unix.Unmount(dir, unix.MNT_DETACH)) })
		},
		"directory in place of the temporary file": func(t *testing.T, dir string) {
			harness.Must(t, os.Mkdir(filepath.Join(dir, "file"+temporarySuffix), 0o700))
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, "file")
			prepare(t, dir)
			writeFile(t, path, old, 0o600)
			if err := Replace(path, make([]byte, size), 0o600); err == nil {
				t.Error("no error")
			}
			wantFile(t, path, old, 0o600)
			if name == "full disk" {
				if err := Replace(path, make([]byte, size), 0o600); !errors.Is(err, unix.ENOSPC) {
					t.Errorf("got %v", err)
				}
				if _, err := os.Stat(path + temporarySuffix); !errors.Is(err, fs.ErrNotExist) {
					t.Errorf("the temporary file takes space: %v", err)
				}
			}
		})
	}
	t.Run("directory in place of the file", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "file")
		harness.Must(t, os.Mkdir(path, 0o700))
		if err := Replace(path, nil, 0o600); err == nil {
			t.Error("no error")
		}
		if _, err := os.Stat(path + temporarySuffix); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the temporary file is left: %v", err)
		}
	})
}

func TestSetAside(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	writeFile(t, path, "{", 0o600)
	var log strings.Builder
	now := time.Date(2026, 1, 2, 3, 4, 5, 6e6, time.UTC)
	for _, want := range []string{"moved aside", "will be overwritten"} { // the second time it is gone
		SetAside(path, ErrCorrupt, now, slog.New(slog.NewTextHandler(&log, nil)))
		if !strings.Contains(log.String(), want) || !strings.Contains(log.String(), ErrCorrupt.Error()) {
			t.Errorf("logged: %s, want %q", log.String(), want)
		}
	}
	wantFile(t, path+".broken-20260102T030405.006Z", "{", 0o600)
	if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the corrupt file is still in place: %v", err)
	}
}

func TestStateFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state", "file")
	var d document
	if _, found, err := Read(path, &d); found || err != nil {
		t.Errorf("missing file: %v, %v", found, err)
	}
	before := time.Now().Add(-time.Second)
	harness.Must(t, Write(path, document{"a"}))
	at, found, err := Read(path, &d)
	if !found || err != nil || d.Name != "a" || at.Before(before) || at.After(time.Now()) {
		t.Errorf("got %+v of %v, %v, %v", d, at, found, err)
	}
	for dir, mode := range map[string]fs.FileMode{filepath.Dir(path): 0o700 | fs.ModeDir, path: 0o600} {
		if info, err := os.Stat(dir); err != nil || info.Mode() != mode {
			t.Errorf("%s: %v, %v", dir, info.Mode(), err)
		}
	}
	for _, bad := range []string{
		"", "{", `{"name":"a"} {}`, `{"name":"a"}x`, `{"name":"a"}]`, `{"other":1}`, `{"name":1}`, "[]",
	} {
		writeFile(t, path, bad, 0o600)
		if _, found, err := Read(path, &document{}); !found || !errors.Is(err, ErrCorrupt) {
			t.Errorf("%q: %v, %v", bad, found, err)
		}
	}
	writeFile(t, path, " {\"name\":\"b\"}\n\n ", 0o600)
	if _, found, err := Read(path, &d); !found || err != nil || d.Name != "b" {
		t.Errorf("white space: %+v, %v, %v", d, found, err)
	}
	harness.Must(t, os.Truncate(path, maxSize+1))
	if _, found, err := Read(path, &d); !found || !errors.Is(err, ErrCorrupt) {
		t.Errorf("too large: %v, %v", found, err)
	}
	// An error of the file system is not corruption: the file must not be moved aside.
	harness.Must(t, errors.Join(os.Remove(path), os.Mkdir(path, 0o700)))
	if _, _, err := Read(path, &d); err == nil || errors.Is(err, ErrCorrupt) {
		t.Errorf("a directory: %v", err)
	}
}

// A file that is not regular keeps no start waiting.
func TestReadIrregularFile(t *testing.T) {
	fifo := filepath.Join(t.TempDir(), "fifo")
	harness.Must(t, unix.Mkfifo(fifo, 0o600))
	for _, path := range []string{fifo, t.TempDir(), "/dev/zero"} {
		_, found, err := Read(path, new(any))
		if found || errors.Is(err, ErrCorrupt) {
			t.Errorf("%s: found %t", path, found)
		}
		harness.WantError(t, err, "not a regular file")
	}
}

func TestReadPrivate(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "file")
	var got document
	if found, err := ReadPrivate(path, &got); found || err != nil {
		t.Fatalf("a missing file: %t, %v", found, err)
	}
	harness.Must(t, Write(path, document{"name"}))
	if found, err := ReadPrivate(path, &got); !found || err != nil || got.Name != "name" {
		t.Fatalf("got %+v, %t, %v", got, found, err)
	}
	link, fifo := filepath.Join(dir, "link"), filepath.Join(dir, "fifo")
	harness.Must(t, errors.Join(os.Symlink(path, link), unix.Mkfifo(fifo, 0o600)))
	for _, c := range []struct {
		name, path string
		change     func() error
		want       string
	}{
		{"symbolic link", link, nil, "symbolic links"},
		{"fifo", fifo, nil, "is not a regular file"},
		{"others may write", path, func() error { return os.Chmod(path, 0o602) }, "has mode 0602"},
		{"group may read", path, func() error { return os.Chmod(path, 0o640) }, "has mode 0640"},
		{"corrupt", path, func() error {
			return errors.Join(os.Chmod(path, 0o600), os.WriteFile(path, []byte("{}{}"), 0o600))
		}, "is a corrupt state file: trailing data"},
		{"another owner", path, func() error { return os.Chown(path, 10001, 0) }, "belongs to user 10001"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.change != nil {
				harness.Must(t, c.change())
			}
			if found, err := ReadPrivate(c.path, &got); !found || err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("found %t, error %v; want %q", found, err, c.want)
			}
		})
	}
}
