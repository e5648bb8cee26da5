package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/pkg/kube/meridio2"
	"github.com/vipgate/vipgate/pkg/kube/translation"
	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
)

type translateCommand struct {
	Filename []string `short:"f" help:"File with objects in YAML or JSON, such as the output of kubectl get -o yaml: those of a Trench, or a Gateway of Meridio 2 and its GatewayRouters; - is stdin. May be repeated." required:"" placeholder:"FILE" env:"-"`
	KeyDir   string   `help:"Directory of the password files of gateways." default:"/etc/vipgate/trench/keys" placeholder:"DIR"`
}

// Run prints the trench file to stdout and the verdicts to stderr. The exit status is 1 if any
// object is refused.
func (c *translateCommand) Run(out *cli.Output) error {
	var objects translation.Objects
	var gateway meridio2.Objects
	for _, name := range c.Filename {
		// Each reader ignores the objects of the other.
		content, err := readFile(name)
		if err != nil {
			return cli.Usage("read objects: %w", err)
		}
		err = errors.Join(objects.Read(bytes.NewReader(content)), gateway.Read(bytes.NewReader(content)))
		if err != nil {
			return cli.Usage("%s: %w", name, err)
		}
	}
	r := translation.Translate(objects, translation.Options{KeyDir: c.KeyDir})
	// Without a Trench, the objects belong to a Gateway of Meridio 2.
	if objects.Trench == nil && (gateway.Gateway != nil || len(gateway.Routers) > 0) {
		r = meridio2.Translate(gateway)
	}
	out.Printf("%s", r.File)
	// stdout has only the file, so that it can be redirected.
	fmt.Fprint(os.Stderr, r.Table())
	for _, line := range ignored(objects, r) {
		fmt.Fprintln(os.Stderr, line)
	}
	if r.Refused() {
		return cli.ExitError(cli.ExitFailed)
	}
	return nil
}

// ignored explains why Services with a class of vipgate have no verdict in this Trench.
func ignored(objects translation.Objects, r translation.Result) []string {
	if r.File == nil {
		return nil
	}
	var lines []string
	for _, s := range objects.Services {
		judged := slices.ContainsFunc(r.Services, func(v translation.ServiceVerdict) bool {
			return v.Object.Namespace == s.Namespace && v.Object.Name == s.Name
		})
		class := s.Spec.LoadBalancerClass
		if judged || class == nil || !strings.HasPrefix(*class, v1alpha1.Group+"/") {
			continue
		}
		why := fmt.Sprintf("namespace %s is none of spec.namespaces of the Trench", s.Namespace)
		if mine := v1alpha1.LoadBalancerClass(r.Trench.Object.Name); *class != mine {
			why = fmt.Sprintf("its class is %s, not %s", *class, mine)
		} else if s.DeletionTimestamp != nil {
			why = "it is being deleted"
		}
		lines = append(lines, fmt.Sprintf("Service %s/%s is ignored: %s", s.Namespace, s.Name, why))
	}
	return lines
}

func readFile(name string) ([]byte, error) {
	if name == "-" {
		return io.ReadAll(os.Stdin)
	}
	return os.ReadFile(name)
}
