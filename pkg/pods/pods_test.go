package pods

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/vipgate/vipgate/test/harness"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fakeSource answers from a table: the output of each command of each pod, and its error.
type fakeSource struct {
	mu      sync.Mutex
	members []Member
	output  map[string]string // by "POD COMMAND"
	failure map[string]error
	follow  chan struct{} // closed to end the connections that follow
}

func (s *fakeSource) Members(context.Context) ([]Member, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.members), nil
}

func (s *fakeSource) Run(ctx context.Context, pod, _ string, command []string, stdout io.Writer) error {
	key := pod + " " + strings.Join(command, " ")
	s.mu.Lock()
	output, failure, follow := s.output[key], s.failure[key], s.follow
	s.mu.Unlock()
	// Half a line is a message of a slow stream.
	for _, part := range []string{output[:len(output)/2], output[len(output)/2:]} {
		if _, err := io.WriteString(stdout, part); err != nil {
			return err
		}
	}
	if slices.Contains(command, "--follow") {
		select {
		case <-ctx.Done():
		case <-follow:
		}
	}
	return failure
}

func member(name string) Member {
	return Member{Name: name, Programs: map[string]string{Frontend: "", LB: ""}}
}

func TestListKeepsEveryPod(t *testing.T) {
	const frontend, lb = " frontend status --output=json", " lb status --output=json"
	waits := member("d")
	waits.Programs[LB], waits.Problem = "the container waits", "the pod is terminating"
	onlyFrontend := Member{Name: "e", Programs: map[string]string{Frontend: ""}}
	source := &fakeSource{
		members: []Member{member("a"), member("b"), member("c"), waits, onlyFrontend},
		output: map[string]string{
			"a" + frontend: `{"trench": "t", "fieldOfTheFuture": 1}`, "a" + lb: `{"trench": "t"}`,
			"b" + frontend: `{"trench": "t"}`, "b" + lb: "{",
			"d" + frontend: `{}`, "e" + frontend: `{}`,
		},
		failure: map[string]error{
			"a" + frontend: &ExitError{Status: 1}, // a VIP is not advertised
			"c" + frontend: &ExitError{Status: 1, Stderr: "first\nfrontend: no socket\n"}, "c" + lb: errors.New("refused"),
		},
	}
	all, err := List(t.Context(), source)
	harness.Must(t, err)
	var got []string
	for _, pod := range all {
		got = append(got, fmt.Sprintf("%s %v %v %s", pod.Name, pod.Frontend != nil, pod.LB != nil,
			strings.Join(pod.Problems, "; ")))
	}
	want := []string{
		"a true true ",
		"b true false lb answers with unreadable JSON: ",
		"c false false frontend does not answer: frontend: no socket; lb does not answer: refused",
		"d true false the pod is terminating; lb: the container waits",
		"e true false ",
	}
	for i := range want {
		if i >= len(got) || !strings.HasPrefix(got[i], want[i]) {
			t.Fatalf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
	}
}

// event returns a kept event and the line of the same event.
func event(second int) (kept, line string) {
	text := fmt.Sprintf(`{"time": "2026-01-01T00:00:%02dZ", "object": "%d"}`, second, second)
	return text, text + "\n"
}

// Each event is passed once, in the order of time, also after connections ended and of a new pod.
func TestFollowMergesEvents(t *testing.T) {
	kept := func(seconds ...int) string {
		var all []string
		for _, second := range seconds {
			text, _ := event(second)
			all = append(all, text)
		}
		return `{"events": [` + strings.Join(all, ",") + `]}`
	}
	lines := func(seconds ...int) (text string) {
		for _, second := range seconds {
			_, line := event(second)
			text += line
		}
		return text
	}
	const list, follow = " frontend events --output=json", " frontend events --follow --output=json"
	one := func(name string) Member { return Member{Name: name, Programs: map[string]string{Frontend: ""}} }
	source := &fakeSource{
		members: []Member{one("a"), one("b")}, follow: make(chan struct{}),
		output: map[string]string{
			"a" + list: kept(1, 3), "b" + list: kept(2), "a" + follow: lines(1, 3, 5), "b" + follow: lines(2, 4),
			"c" + follow: lines(6),
		},
	}
	ctx, cancel := context.WithCancel(harness.Context(t, 20*time.Second))
	defer cancel()
	var got []string
	notes := 0
	err := Follow(ctx, source, func(events []Event) error {
		for _, event := range events {
			if event.Note != "" {
				notes++
				continue
			}
			got = append(got, event.Pod+event.GetObject())
		}
		if len(got) >= 5 && len(source.members) == 2 {
			source.mu.Lock()
			source.members = append(source.members, one("c"))
			close(source.follow)
			source.follow = make(chan struct{})
			source.mu.Unlock()
		}
		if len(got) >= 6 {
			cancel()
		}
		return nil
	})
	harness.Must(t, err)
	if want := "a1 b2 a3 b4 a5 c6"; strings.Join(got, " ") != want {
		t.Errorf("got %v, want %s", got, want)
	}
	if notes != 2 {
		t.Errorf("%d notes, want one for each connection that ended", notes)
	}
}

func TestFollowEndsWhenItCannotPrint(t *testing.T) {
	source := &fakeSource{members: []Member{member("a")}, failure: map[string]error{
		"a frontend events --output=json": errors.New("no frontend"),
	}}
	broken := errors.New("broken pipe")
	if err := Follow(t.Context(), source, func([]Event) error { return broken }); !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}
}

func TestMembersOfAMachine(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"b/lb.sock", "a/frontend.sock", "a/lb.sock", "c/other.sock"} {
		harness.Must(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o700))
		harness.Must(t, os.WriteFile(filepath.Join(dir, name), nil, 0o600))
	}
	for path, want := range map[string]string{dir: "a b", filepath.Join(dir, "a"): "a"} {
		members, err := Machine{Dir: path}.Members(t.Context())
		harness.Must(t, err)
		var names []string
		for _, member := range members {
			names = append(names, member.Name)
		}
		if strings.Join(names, " ") != want {
			t.Errorf("%s: got %v, want %s", path, names, want)
		}
	}
	_, err := Machine{Dir: filepath.Join(dir, "c")}.Members(t.Context())
	harness.WantError(t, err, "no admin socket in")
}
