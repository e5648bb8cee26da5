package main

import (
	"fmt"
	"io"
	"os"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/pkg/kube/meridio2"
	"github.com/vipgate/vipgate/pkg/kube/translation"
)

type translateCommand struct {
	Objects  string   `help:"trench, or meridio2 for a Gateway of Meridio 2 and its GatewayRouters." enum:"trench,meridio2" default:"trench"`
	Filename []string `short:"f" help:"File with objects in YAML or JSON, such as the output of kubectl get -o yaml; - is stdin. May be repeated." required:"" placeholder:"FILE" env:"-"`
	KeyDir   string   `help:"Directory of the password files of gateways." default:"/etc/vipgate/trench/keys" placeholder:"DIR"`
}

// Run prints the trench file, and the verdicts on stderr. The exit status is 1 when anything is
// refused.
func (c *translateCommand) Run(out *cli.Output) error {
	var objects translation.Objects // of a Trench
	var gateway meridio2.Objects
	read := objects.Read
	if c.Objects == meridio2Objects {
		read = gateway.Read
	}
	for _, name := range c.Filename {
		if err := readObjects(read, name); err != nil {
			return err
		}
	}
	r := translation.Translate(objects, translation.Options{KeyDir: c.KeyDir})
	if c.Objects == meridio2Objects {
		r = meridio2.Translate(gateway)
	}
	out.Printf("%s", r.File)
	fmt.Fprint(os.Stderr, r.Table())
	if r.Refused() {
		return cli.ExitError(cli.ExitFailed)
	}
	return nil
}

func readObjects(read func(io.Reader) error, name string) error {
	file := os.Stdin
	if name != "-" {
		var err error
		if file, err = os.Open(name); err != nil {
			return cli.Usage("read objects: %w", err)
		}
		defer file.Close()
	}
	if err := read(file); err != nil {
		return cli.Usage("%s: %w", name, err)
	}
	return nil
}
