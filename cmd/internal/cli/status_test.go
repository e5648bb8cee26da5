package cli

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	grpcstatus "google.golang.org/grpc/status"
)

func TestErrorsOfCallsHaveNoWordsOfGRPC(t *testing.T) {
	conn, err := grpc.NewClient("unix:"+filepath.Join(t.TempDir(), "none.sock"),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	unreachable := conn.Invoke(t.Context(), "/a.B/C", nil, nil)
	for want, err := range map[string]error{
		"no such file or directory": unreachable,
		"did not answer within 5s":  grpcstatus.Error(codes.DeadlineExceeded, "context deadline exceeded"),
		"not in the attractor":      grpcstatus.Error(codes.NotFound, "VIP 20.0.0.9/32 is not in the attractor"),
		"has no prefix length":      grpcstatus.Error(codes.InvalidArgument, "VIP 20.0.0.9 has no prefix length"),
	} {
		got := Explain(err)
		if !strings.Contains(got.Error(), want) || strings.Contains(got.Error(), "desc =") ||
			strings.Contains(got.Error(), "rpc error") {
			t.Errorf("got %q, want %q", got, want)
		}
		var usage *UsageError
		if errors.As(got, &usage) != (grpcstatus.Code(err) == codes.InvalidArgument) {
			t.Errorf("%v: usage error is %v", got, usage != nil)
		}
	}
}

type failingLine struct {
	Status failingCommand `cmd:"" default:"1"`
}

type failingCommand struct{}

func (failingCommand) Run() error { return grpcstatus.Error(codes.InvalidArgument, "no prefix length") }

func TestErrorOfACommandIsExplained(t *testing.T) {
	if status := run(t.Context(), Program{Name: "test"}, &failingLine{}, nil); status != ExitUsage {
		t.Errorf("exit status %d", status)
	}
}
