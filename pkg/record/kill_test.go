package record

import (
	"bufio"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// writerVariable makes the test binary a writer in the directory that it names.
const writerVariable = "VIPGATE_RECORD_TEST_WRITER"

const writerTargets = 60

// writeForEver writes change after change, and says on standard output which ones were
// written. It is killed.
func writeForEver(dir string) int {
	s, damage, err := Open(dir, slog.New(slog.DiscardHandler))
	if err != nil || damage != nil {
		fmt.Fprintln(os.Stderr, damage, err)
		return 1
	}
	r, err := s.Load()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	for turn := writtenTurn(r) + 1; ; turn++ {
		if err := s.Write(changeOfTurn(turn)); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		fmt.Println(turn)
	}
}

// changeOfTurn leaves the records such that all of them tell the turn, and that those
// that are there are those of the turn.
func changeOfTurn(turn uint64) Change {
	var c Change
	for i := range uint32(writerTargets) {
		if uint64(i)%7 == turn%7 {
			c.RemoveTargets = append(c.RemoveTargets, 5000+i)
			continue
		}
		// The size of the record changes, so that pages split and merge.
		name := fmt.Sprintf("%d-%0*d", i, turn*31%150+1, 0)
		c.Targets = append(c.Targets, Target{
			Number: 5000 + i, Stream: "s", Name: name, IPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 0, 0, byte(i)})},
			DrainEnd: time.Unix(0, int64(turn)), Stage: Applied,
		})
	}
	c.Streams = []Stream{{Name: "s", VIPs: []vip.VIP{vip.Require("20.0.0.1/32")}, Size: 1009, Seed: 1, DrainTime: time.Duration(turn), Stage: Applied}}
	return c
}

func writtenTurn(r Records) uint64 { return uint64(r.Streams["s"].DrainTime) }

// A writer is killed at random instants. The file is always readable, holds whole
// changes only, and none that was said to be written is missing.
func TestKilledAtAnyInstantTheFileHoldsWholeChanges(t *testing.T) {
	dir := t.TempDir()
	random := rand.New(rand.NewPCG(1, 2))
	for round := range 50 {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), writerVariable+"="+dir)
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(out)
		if round%5 > 0 && !lines.Scan() { // else perhaps before it wrote anything
			t.Fatal("the writer wrote nothing")
		}
		said := uint64(0)
		killed := make(chan error, 1)
		go func() {
			<-time.After(time.Duration(random.IntN(10_000)) * time.Microsecond)
			killed <- cmd.Process.Kill()
		}()
		for lines.Scan() {
			if said, err = strconv.ParseUint(lines.Text(), 10, 64); err != nil {
				t.Fatal(err)
			}
		}
		if err := <-killed; err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait() // it was killed
		s := mustOpen(t, dir)
		r, err := s.Load()
		if err != nil {
			t.Fatal(err)
		}
		mustClose(t, s)
		turn := writtenTurn(r)
		if turn < said || said > 0 && turn > said+1 {
			t.Fatalf("turn %d was said to be written last, the file has %d", said, turn)
		}
		if turn == 0 {
			continue
		}
		want, _ := Records{Targets: map[uint32]Target{}, Streams: map[string]Stream{}}.with(changeOfTurn(turn))
		if diff := differ(want, r); diff != "" {
			t.Fatalf("round %d, turn %d is not whole (-want +got)\n%s", round, turn, diff)
		}
	}
	s := mustOpen(t, dir)
	defer mustClose(t, s)
	r, err := s.Load()
	if err != nil || writtenTurn(r) < 50 {
		t.Fatalf("%d turns in all, %v", writtenTurn(r), err)
	}
	t.Logf("%d turns in all", writtenTurn(r))
}
