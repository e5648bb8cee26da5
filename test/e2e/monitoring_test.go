package e2e

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"go.yaml.in/yaml/v4"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

const monitoring = "../../deployments/components/monitoring/"

// needPrometheus skips a test when the machine lacks Prometheus.
func needPrometheus(t *testing.T) {
	t.Helper()
	for _, program := range []string{"prometheus", "promtool"} {
		if _, err := exec.LookPath(program); err != nil {
			lab.Skip(t, program+" (Debian: apt-get install prometheus)")
		}
	}
}

// writeRules writes the alerts of the PrometheusRule as a rule file of Prometheus.
func writeRules(t *testing.T, file string) {
	t.Helper()
	var rule struct {
		Spec map[string]any
	}
	data, err := os.ReadFile(monitoring + "prometheusrule.yaml")
	harness.Must(t, err)
	harness.Must(t, yaml.Load(data, &rule))
	if data, err = yaml.Dump(rule.Spec); err != nil {
		t.Fatal(err)
	}
	harness.Must(t, os.WriteFile(file, data, 0o600))
}

func TestAlerts(t *testing.T) {
	t.Parallel()
	needPrometheus(t)
	dir := t.TempDir()
	writeRules(t, filepath.Join(dir, "rules.yaml"))
	tests, err := os.ReadFile("testdata/alerts.yaml")
	harness.Must(t, err)
	harness.Must(t, os.WriteFile(filepath.Join(dir, "alerts.yaml"), tests, 0o600))
	for _, args := range [][]string{{"check", "rules", "--lint-fatal", "rules.yaml"}, {"test", "rules", "alerts.yaml"}} {
		cmd := exec.CommandContext(t.Context(), "promtool", args...)
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
}

// dashboardQueries returns the expressions of the dashboard by the titles of their panels.
func dashboardQueries(t *testing.T) map[string][]string {
	t.Helper()
	var dashboard struct {
		Annotations struct {
			List []struct{ Name, Expr string }
		}
		Panels []struct {
			Type, Title string
			Targets     []struct{ Expr string }
		}
	}
	data, err := os.ReadFile(monitoring + "dashboard.json")
	harness.Must(t, err)
	harness.Must(t, json.Unmarshal(data, &dashboard))
	queries := map[string][]string{}
	variables := strings.NewReplacer("$namespace", "trench-a", "$pod", ".*", "$__rate_interval", "1m")
	for _, p := range dashboard.Panels {
		for _, target := range p.Targets {
			queries[p.Title] = append(queries[p.Title], variables.Replace(target.Expr))
		}
	}
	for _, a := range dashboard.Annotations.List {
		queries[a.Name] = append(queries[a.Name], variables.Replace(a.Expr))
	}
	if len(queries) < 20 {
		t.Fatalf("found only %d panels", len(queries))
	}
	return queries
}

// prometheusConfig scrapes the programs of a pod with the labels of the PodMonitor.
func prometheusConfig(rules string, endpoints map[string]string) string {
	var text strings.Builder
	fmt.Fprintf(&text, "global: {scrape_interval: 500ms, scrape_timeout: 500ms, evaluation_interval: 1s}\n"+
		"rule_files: [%s]\nscrape_configs:\n  - job_name: trench-a/vipgate\n    static_configs:\n", rules)
	for container, address := range endpoints {
		fmt.Fprintf(&text, "      - targets: [%q]\n        labels: {namespace: trench-a, pod: pod-1, container: %s}\n",
			address, container)
	}
	return text.String()
}

// Each query of the dashboard has a result, from the metrics that Prometheus scrapes of a running
// pod.
func TestDashboardQueries(t *testing.T) {
	t.Parallel()
	needPrometheus(t)
	f := newFixture(t)
	f.up(f.target1, f.target2)
	for _, family := range []string{"ipv4", "ipv6"} {
		f.must(f.Pod.Sysctl("net."+family+".fib_multipath_hash_policy", "1"))
	}
	f.must(f.pod.WriteTrench(viaAddress(usualTrench())))
	f.must(f.pod.StartLB("--dataplane=nftables"))
	f.must(f.pod.StartFrontend())
	f.wantRoutes(every()...)
	const kubeMetrics = "127.0.0.1:2225"
	f.startStaleKube()

	dir := t.TempDir()
	writeRules(t, filepath.Join(dir, "rules.yaml"))
	config := filepath.Join(dir, "prometheus.yaml")
	f.must(os.WriteFile(config, []byte(prometheusConfig("rules.yaml", map[string]string{
		"lb": lab.LBMetrics, "frontend": lab.FrontendMetrics, "kube": kubeMetrics,
	})), 0o600))
	const listen = "127.0.0.1:9090"
	_, err := f.Start(f.Pod, "prometheus", "prometheus", "--config.file="+config, "--storage.tsdb.path="+dir+"/data",
		"--web.listen-address="+listen, "--log.level=error")
	f.must(err)
	query := func(expression string) (string, error) {
		return f.Pod.Run(t.Context(), "promtool", "query", "instant", "http://"+listen, expression)
	}
	f.waitFor(func() error {
		out, err := query(`sum(up) == 3 and sum(changes(process_cpu_seconds_total[1m])) >= 0`)
		if err == nil && strings.TrimSpace(out) == "" {
			err = fmt.Errorf("the pod is not scraped yet")
		}
		return err
	})
	// A state transition, for the annotation.
	f.down(f.target2)
	f.wantRoutes(vipA4, vipA6)
	// Without an API server no object can be refused, and no leader is elected.
	without := map[string]bool{"Refused objects": true, "Leader": true}
	for title, expressions := range dashboardQueries(t) {
		for _, expression := range expressions {
			f.waitFor(func() error {
				out, err := query(expression)
				if err == nil && strings.TrimSpace(out) == "" && !without[title] {
					err = fmt.Errorf("%s: no result of %s", title, expression)
				}
				return err
			})
		}
	}
	// The alert of a kube without an API server is pending, and no other alert of this pod fires.
	out, err := query(`ALERTS{alertstate="firing"} or vipgate_kube_stale_seconds > 0`)
	if err != nil || strings.Contains(out, "firing") || !strings.Contains(out, "vipgate_kube_stale_seconds") {
		t.Errorf("alerts: %v\n%s", err, out)
	}
}

// startStaleKube starts a kube whose API server does not answer.
func (f *fixture) startStaleKube() {
	f.t.Helper()
	dir := f.t.TempDir()
	kube := filepath.Join(dir, "kube")
	build := exec.CommandContext(f.t.Context(), "go", "build", "-o", kube, "../../cmd/kube")
	if out, err := build.CombinedOutput(); err != nil {
		f.t.Fatalf("%v: %s", err, out)
	}
	config := filepath.Join(dir, "kubeconfig")
	f.must(os.WriteFile(config, []byte(fmt.Sprintf("{apiVersion: v1, kind: Config, current-context: c, "+
		"contexts: [{name: c, context: {cluster: c, user: u}}], clusters: [{name: c, cluster: {server: 'https://%s'}}], "+
		"users: [{name: u, user: {token: t}}]}", net.JoinHostPort("127.0.0.1", "6443"))), 0o600))
	_, err := f.Start(f.Pod, "kube", kube, "run", "--trench=trench-a", "--namespace=trench-a", "--pod-name=pod-1",
		"--kubeconfig="+config, "--trench-file="+filepath.Join(dir, "trench.yaml"), "--key-dir="+filepath.Join(dir, "keys"),
		"--admin-socket=unix://"+filepath.Join(dir, "admin.sock"),
		"--frontend-admin-socket=unix://"+f.pod.FrontendAdmin())
	f.must(err)
}
