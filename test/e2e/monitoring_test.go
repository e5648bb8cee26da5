package e2e

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v4"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

const monitoring = "../../deployments/components/monitoring/"

// needPrometheus skips a test when the machine lacks Prometheus.
func needPrometheus(t *testing.T) {
	t.Helper()
	lab.Need(t, "prometheus", "promtool")
}

// rules is the content of the PrometheusRule.
type rules struct {
	Groups []struct {
		Name  string `yaml:"name"`
		Rules []rule `yaml:"rules"`
	} `yaml:"groups"`
}

type rule struct {
	Alert       string            `yaml:"alert"`
	Expr        string            `yaml:"expr"`
	For         string            `yaml:"for,omitempty"`
	Labels      map[string]string `yaml:"labels"`
	Annotations map[string]string `yaml:"annotations"`
}

// writeRules writes the alerts of the PrometheusRule, which edit changes, as a rule file of
// Prometheus.
func writeRules(t *testing.T, file string, edit func(*rule)) []rule {
	t.Helper()
	var object struct{ Spec rules }
	data, err := os.ReadFile(monitoring + "prometheusrule.yaml")
	harness.Must(t, err)
	harness.Must(t, yaml.Load(data, &object))
	list := object.Spec.Groups[0].Rules
	for i := range list {
		edit(&list[i])
	}
	data, err = yaml.Dump(object.Spec)
	harness.Must(t, err)
	harness.Must(t, os.WriteFile(file, data, 0o600))
	return list
}

// labelPattern matches a label in the template of an annotation.
var labelPattern = regexp.MustCompile(`\$labels\.([a-z_]+)`)

// Each alert fires in a case of promtool and is silent in another. The cases compare the summary
// only: descriptions contain no value besides labels, which the alert must have. test/docs checks
// their commands.
func TestAlerts(t *testing.T) {
	t.Parallel()
	needPrometheus(t)
	dir := t.TempDir()
	descriptions := map[string]string{}
	list := writeRules(t, filepath.Join(dir, "rules.yaml"), func(r *rule) {
		descriptions[r.Alert] = r.Annotations["description"]
		r.Annotations = map[string]string{"summary": r.Annotations["summary"]}
	})
	text, err := os.ReadFile("testdata/alerts.yaml")
	harness.Must(t, err)
	harness.Must(t, os.WriteFile(filepath.Join(dir, "alerts.yaml"), text, 0o600))
	for _, args := range [][]string{{"check", "rules", "--lint-fatal", "rules.yaml"}, {"test", "rules", "alerts.yaml"}} {
		cmd := exec.CommandContext(t.Context(), "promtool", args...)
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
	var cases struct {
		Tests []struct {
			AlertRuleTest []struct {
				Alertname string `yaml:"alertname"`
				ExpAlerts []struct {
					ExpLabels map[string]string `yaml:"exp_labels"`
				} `yaml:"exp_alerts"`
			} `yaml:"alert_rule_test"`
		} `yaml:"tests"`
	}
	harness.Must(t, yaml.Load(text, &cases))
	fires, silent := map[string]map[string]string{}, map[string]bool{}
	for _, group := range cases.Tests {
		for _, c := range group.AlertRuleTest {
			if len(c.ExpAlerts) == 0 {
				silent[c.Alertname] = true
			} else {
				fires[c.Alertname] = c.ExpAlerts[0].ExpLabels
			}
		}
	}
	for _, r := range list {
		if fires[r.Alert] == nil || !silent[r.Alert] {
			t.Errorf("%s fires in a test: %t, and is silent in one: %t", r.Alert, fires[r.Alert] != nil, silent[r.Alert])
		}
		for _, label := range labelPattern.FindAllStringSubmatch(descriptions[r.Alert], -1) {
			if _, has := fires[r.Alert][label[1]]; !has {
				t.Errorf("%s has no label %s, which its description names", r.Alert, label[1])
			}
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
			Type, Title, Description string
			Targets                  []struct{ Expr string }
		}
	}
	data, err := os.ReadFile(monitoring + "dashboard.json")
	harness.Must(t, err)
	harness.Must(t, json.Unmarshal(data, &dashboard))
	queries := map[string][]string{}
	variables := strings.NewReplacer("$namespace", "trench-a", "$pod", ".*", "$__rate_interval", "1h")
	for _, p := range dashboard.Panels {
		if p.Type != "row" && p.Description == "" {
			t.Errorf("panel %s has no description", p.Title)
		}
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
	writeRules(t, filepath.Join(dir, "rules.yaml"), func(*rule) {})
	config := filepath.Join(dir, "prometheus.yaml")
	f.must(os.WriteFile(config, []byte(prometheusConfig("rules.yaml", map[string]string{
		"lb": lab.LBMetrics, "frontend": lab.FrontendMetrics, "kube": kubeMetrics,
	})), 0o600))
	query := f.startPrometheus(dir, config)
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
	// Without an API server no object can be refused, and no leader is elected. vipgate-probe does not
	// run here.
	without := map[string]bool{
		"Refused objects": true, "Leader": true, "Reachability, by probe": true,
		"Paths that are dead or unknown": true, "Latency of VIPs": true,
	}
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
	// The alert of a kube without an API server is pending, or fires on a slow machine. No other alert
	// of this pod fires; a VIP that was down for a minute fired one.
	f.up(f.target2)
	f.wantRoutes(every()...)
	f.waitFor(func() error {
		out, err := query(`ALERTS{alertstate="firing", alertname!="VipgateKubeStale"} or vipgate_kube_stale_seconds > 0`)
		if err == nil && (strings.Contains(out, "firing") || !strings.Contains(out, "vipgate_kube_stale_seconds")) {
			err = fmt.Errorf("alerts:\n%s", out)
		}
		return err
	})
}

// startPrometheus starts Prometheus in the pod, and returns a function that evaluates expressions.
func (f *fixture) startPrometheus(dir, config string) func(expression string) (string, error) {
	f.t.Helper()
	const listen = "127.0.0.1:9090"
	_, err := f.Start(f.Pod, "prometheus", "prometheus", "--config.file="+config, "--storage.tsdb.path="+dir+"/data",
		"--web.listen-address="+listen, "--log.level=error")
	f.must(err)
	return func(expression string) (string, error) {
		return f.Pod.Run(f.t.Context(), "promtool", "query", "instant", "http://"+listen, expression)
	}
}

// A router without power is one notification: the alerts of a real pod, evaluated by Prometheus
// without their delays, reach an Alertmanager with the shipped inhibition rules.
func TestDeadGatewayIsOnePage(t *testing.T) {
	t.Parallel()
	needPrometheus(t)
	lab.Need(t, "prometheus-alertmanager")
	f := newServing(t, 2)
	dir := t.TempDir()
	delays := map[string]time.Duration{}
	writeRules(t, filepath.Join(dir, "rules.yaml"), func(r *rule) {
		delay, err := time.ParseDuration(cmp.Or(r.For, "0s"))
		harness.Must(t, err)
		delays[r.Alert], r.For = delay, ""
	})
	inhibitions, err := os.ReadFile(monitoring + "alertmanager.yaml")
	harness.Must(t, err)
	wantOrder(t, inhibitions, delays)
	const alertmanager = "127.0.0.1:9093"
	config := filepath.Join(dir, "prometheus.yaml")
	f.must(os.WriteFile(config, []byte(prometheusConfig("rules.yaml", map[string]string{
		"lb": lab.LBMetrics, "frontend": lab.FrontendMetrics,
	})+"alerting: {alertmanagers: [{static_configs: [{targets: ['"+alertmanager+"']}]}]}\n"), 0o600))
	inhibit := filepath.Join(dir, "alertmanager.yaml")
	f.must(os.WriteFile(inhibit, inhibitions, 0o600))
	_, err = f.Start(f.Pod, "alertmanager", "prometheus-alertmanager", "--config.file="+inhibit,
		"--storage.path="+dir+"/alertmanager", "--web.listen-address="+alertmanager, "--cluster.listen-address=",
		"--log.level=error")
	f.must(err)
	f.waitFor(func() error {
		conn, err := f.dialPod(t.Context(), "tcp", alertmanager)
		if err == nil {
			conn.Close()
		}
		return err
	})
	query := f.startPrometheus(dir, config)
	f.must(f.gateway.Process.Kill())
	f.waitFor(func() error {
		out, err := query(`count by (alertname) (ALERTS{alertstate="firing"})`)
		for _, name := range []string{
			"NoGateway", "VIPDown", "VIPNotAnnounced", "NoEgress", "GatewayDown",
		} {
			if err == nil && !strings.Contains(out, "Vipgate"+name+`"`) {
				err = fmt.Errorf("%s does not fire: %s", name, out)
			}
		}
		return err
	})
	f.waitFor(func() error {
		var groups []struct {
			Labels map[string]string
			Alerts []struct{ Labels map[string]string }
		}
		page := f.get(alertmanager, "/api/v2/alerts/groups?inhibited=false&silenced=false")
		if err := json.Unmarshal([]byte(page), &groups); err != nil {
			return err
		}
		if len(groups) != 1 || groups[0].Labels["alertname"] != "VipgateNoGateway" || len(groups[0].Alerts) != 2 {
			return fmt.Errorf("want one notification about both families: %s", page)
		}
		return nil
	})
	all := f.get(alertmanager, "/api/v2/alerts?inhibited=true")
	if got := strings.Count(all, `"state":"suppressed"`); got < 10 {
		t.Errorf("%d alerts are inhibited: %s", got, all)
	}
}

// wantOrder fails if the source of an inhibition fires later than one of its targets: the target
// would be a notification of its own.
func wantOrder(t *testing.T, text []byte, delays map[string]time.Duration) {
	t.Helper()
	var config struct {
		InhibitRules []struct {
			SourceMatchers []string `yaml:"source_matchers"`
			TargetMatchers []string `yaml:"target_matchers"`
		} `yaml:"inhibit_rules"`
	}
	harness.Must(t, yaml.Load(text, &config))
	alerts := regexp.MustCompile(`Vipgate\w+`)
	for _, inhibition := range config.InhibitRules {
		source := alerts.FindString(inhibition.SourceMatchers[0])
		for _, target := range alerts.FindAllString(inhibition.TargetMatchers[0], -1) {
			first, known := delays[source]
			second, exists := delays[target]
			if !known || !exists || first > second {
				t.Errorf("%s fires after %v (%t) and inhibits %s, which fires after %v (%t)", source, first, known, target,
					second, exists)
			}
		}
	}
	if len(config.InhibitRules) < 5 {
		t.Errorf("only %d inhibitions", len(config.InhibitRules))
	}
}

// startStaleKube starts a kube whose API server does not answer.
func (f *fixture) startStaleKube() {
	f.t.Helper()
	dir := f.t.TempDir()
	config := filepath.Join(dir, "kubeconfig")
	f.must(os.WriteFile(config, []byte(fmt.Sprintf("{apiVersion: v1, kind: Config, current-context: c, "+
		"contexts: [{name: c, context: {cluster: c, user: u}}], clusters: [{name: c, cluster: {server: 'https://%s'}}], "+
		"users: [{name: u, user: {token: t}}]}", net.JoinHostPort("127.0.0.1", "6443"))), 0o600))
	_, err := f.Start(f.Pod, "kube", filepath.Join(binaries, "kube"), "run",
		"--trench=trench-a", "--namespace=trench-a", "--pod-name=pod-1",
		"--kubeconfig="+config, "--trench-file="+filepath.Join(dir, "trench.yaml"), "--key-dir="+filepath.Join(dir, "keys"),
		"--admin-socket=unix://"+filepath.Join(dir, "admin.sock"),
		"--frontend-admin-socket=unix://"+f.pod.FrontendAdmin())
	f.must(err)
}
