package pods

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/proto"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	lbv1 "github.com/vipgate/vipgate/pkg/api/lb/v1"
	"github.com/vipgate/vipgate/pkg/status"
)

const (
	// askTimeout bounds the answer of one program.
	askTimeout = 10 * time.Second
	// parallel is the number of programs that are asked at the same time.
	parallel = 16
)

// The programs of a trench pod, which are also the names of its containers.
const (
	Frontend = "frontend"
	LB       = "lb"
	Kube     = "kube"
)

// Pod is a trench pod as its programs describe it.
type Pod = status.Pod

// Member is a pod of the trench before it is asked.
type Member struct {
	Name string
	// Programs maps the programs of the pod to why they cannot be asked, or "".
	Programs map[string]string
	// Problem is a problem of the whole pod, such as its end; empty without one.
	Problem string
}

// Source knows the pods of a trench.
type Source interface {
	// Members lists the pods, ordered by name.
	Members(ctx context.Context) ([]Member, error)
	// Run runs a command in the container of a program, until the command or ctx ends. The error of a
	// command that fails is an [*ExitError].
	Run(ctx context.Context, pod, program string, command []string, stdout io.Writer) error
}

// ExitError is the end of a command with a status other than 0.
type ExitError struct {
	Status int
	Stderr string
}

// Error returns the last line of the command's error output.
func (e *ExitError) Error() string {
	lines := strings.Split(strings.TrimSpace(e.Stderr), "\n")
	if last := lines[len(lines)-1]; last != "" {
		return last
	}
	return fmt.Sprintf("exit status %d", e.Status)
}

// List asks all pods. The error is the source's own: a pod that does not answer is in the list.
func List(ctx context.Context, source Source) ([]Pod, error) {
	members, err := source.Members(ctx)
	if err != nil {
		return nil, err
	}
	all := make([]Pod, len(members))
	problems := make([][2]string, len(members)) // of frontend and lb
	err = each(ctx, members, func(ctx context.Context, i int, program string) {
		switch program {
		case Frontend:
			answer := &frontendv1.Status{}
			if problems[i][0] = ask(ctx, source, members[i], program, "status", answer); problems[i][0] == "" {
				all[i].Frontend = answer
			}
		case LB:
			answer := &lbv1.Status{}
			if problems[i][1] = ask(ctx, source, members[i], program, "status", answer); problems[i][1] == "" {
				all[i].LB = answer
			}
		}
	})
	for i, member := range members {
		all[i].Name = member.Name
		all[i].Problems = slices.DeleteFunc([]string{member.Problem, problems[i][0], problems[i][1]},
			func(problem string) bool { return problem == "" })
	}
	return all, err
}

// each calls do for frontend and lb of each member, in parallel.
func each(ctx context.Context, members []Member, do func(ctx context.Context, member int, program string)) error {
	var group errgroup.Group
	group.SetLimit(parallel)
	for i, member := range members {
		for _, program := range []string{Frontend, LB} {
			if _, exists := member.Programs[program]; !exists {
				continue
			}
			group.Go(func() error {
				ctx, cancel := context.WithTimeout(ctx, askTimeout)
				defer cancel()
				do(ctx, i, program)
				return nil
			})
		}
	}
	_ = group.Wait() // the functions return no error
	return ctx.Err()
}

// ask reads the output of a command of a program into answer, and returns why there is none.
func ask(ctx context.Context, source Source, member Member, program, command string, answer proto.Message) string {
	if reason := member.Programs[program]; reason != "" {
		return program + ": " + reason
	}
	var out bytes.Buffer
	err := source.Run(ctx, member.Name, program, []string{program, command, "--output=json"}, &out)
	// The exit status of a complete answer reports VIPs that are not advertised.
	var exit *ExitError
	if err != nil && !(errors.As(err, &exit) && out.Len() > 0) {
		if ctx.Err() != nil {
			err = fmt.Errorf("no answer within %v", askTimeout)
		}
		return program + " does not answer: " + err.Error()
	}
	if err := unmarshal(out.Bytes(), answer); err != nil {
		return program + " answers with unreadable JSON: " + err.Error()
	}
	return ""
}
