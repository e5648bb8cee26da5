package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/pkg/kube/meridio2"
	"github.com/vipgate/vipgate/pkg/kube/translation"
	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
	"github.com/vipgate/vipgate/pkg/trench"
	trenchfile "github.com/vipgate/vipgate/pkg/trench/file"
)

type translateCommand struct {
	Filename []string `short:"f" help:"File with objects in YAML or JSON, such as the output of kubectl get -o yaml: those of a Trench, or a Gateway of Meridio 2 and its GatewayRouters; - is stdin, a directory its YAML and JSON files. May be repeated." required:"" placeholder:"FILE" env:"-"`
	KeyDir   string   `help:"Directory of the password files of gateways." default:"/etc/vipgate/keys" placeholder:"DIR"`
	Against  string   `help:"Print the changes from the objects of this file or directory, instead of the trench file." placeholder:"DIR|FILE" env:"-"`
	Output   string   `short:"o" help:"Of --against: table or json." enum:"table,json" default:"table"`
}

// Run prints the trench file, or the changes, to stdout and the verdicts to stderr. The exit status
// is 1 if any object is refused or a removal would be held.
func (c *translateCommand) Run(out *cli.Output) error {
	objects, r, err := c.translate(c.Filename...)
	if err != nil {
		return err
	}
	// stdout has only the file, so that it can be redirected.
	if c.Against == "" {
		out.Printf("%s", r.File)
	} else {
		err = c.compare(out, r)
	}
	fmt.Fprint(os.Stderr, r.Table())
	for _, line := range ignored(objects, r) {
		fmt.Fprintln(os.Stderr, line)
	}
	if err == nil && len(r.Refused()) > 0 {
		return cli.ExitError(cli.ExitFailed)
	}
	return err
}

func (c *translateCommand) translate(names ...string) (translation.Objects, translation.Result, error) {
	var objects translation.Objects
	var gateway meridio2.Objects
	for _, name := range names {
		contents, err := readFiles(name)
		if err != nil {
			return objects, translation.Result{}, cli.Usage("read objects: %w", err)
		}
		for _, content := range contents {
			// Each reader ignores the objects of the other.
			err := errors.Join(objects.Read(bytes.NewReader(content)), gateway.Read(bytes.NewReader(content)))
			if err != nil {
				return objects, translation.Result{}, cli.Usage("%s: %w", name, err)
			}
		}
	}
	// Without a Trench, the objects belong to a Gateway of Meridio 2.
	if objects.Trench == nil && (gateway.Gateway != nil || len(gateway.Routers) > 0) {
		return objects, meridio2.Translate(gateway), nil
	}
	return objects, translation.Translate(objects, translation.Options{KeyDir: c.KeyDir}), nil
}

// compare prints the changes from the objects of --against.
func (c *translateCommand) compare(out *cli.Output, next translation.Result) error {
	_, old, err := c.translate(c.Against)
	if err != nil {
		return err
	}
	var configs [2]*trench.Config
	for i, r := range []translation.Result{old, next} {
		name := []string{c.Against, strings.Join(c.Filename, ", ")}[i]
		if r.File == nil {
			return cli.Usage("%s: no trench file, since there is no accepted Trench or Gateway", name)
		}
		if configs[i], err = trenchfile.Parse(name, r.File, trench.DefaultDefaults()); err != nil {
			return cli.Usage("%w", err)
		}
	}
	edit := cli.Change{Valid: len(next.Refused()) == 0}
	edit.Compare(configs[0], configs[1])
	return edit.Print(out, c.Output == "json", frontendDrainTime)
}

// frontendDrainTime is the default of the frontend's --drain-time.
const frontendDrainTime = time.Second

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

// readFiles returns the content of a file, of stdin, or of the YAML and JSON files of a directory.
func readFiles(name string) (contents [][]byte, err error) {
	names := []string{name}
	if name == "-" {
		content, err := io.ReadAll(os.Stdin)
		return [][]byte{content}, err
	}
	if info, err := os.Stat(name); err == nil && info.IsDir() {
		if names, err = filepath.Glob(filepath.Join(name, "*")); err != nil {
			return nil, err
		}
		names = slices.DeleteFunc(names, func(name string) bool {
			return !slices.Contains([]string{".yaml", ".yml", ".json"}, filepath.Ext(name))
		})
	}
	for _, name := range names {
		content, err := os.ReadFile(name)
		if err != nil {
			return nil, err
		}
		contents = append(contents, content)
	}
	return contents, nil
}
