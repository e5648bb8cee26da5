package kube

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/pkg/kube/cluster"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
)

func TestAPIServerNamespacesChange(t *testing.T) {
	f, k := withPod(t)
	f.addNamespace("apps")
	f.addPod("apps", "api-1", "10.0.1.1")
	f.Apply(t, strings.NewReplacer("name: web, namespace: trench-a", "name: api, namespace: apps",
		"20.0.0.1", "20.0.0.2").Replace(web))
	f.patch(trenchResource, "trench-a", `{"spec":{"namespaces":["trench-a","apps"]}}`)
	f.awaitContent("apps.api: api-1=[10.0.1.1]; " + onePod)

	// If kube may not read a new namespace, the previous namespaces stay in force.
	f.Apply(t, "apiVersion: v1\nkind: Namespace\nmetadata: {name: closed}")
	f.patch(trenchResource, "trench-a", `{"spec":{"namespaces":["trench-a","closed"]}}`)
	k.awaitStale("namespace closed")
	f.addPod("trench-a", "web-2", "10.0.0.2")
	f.awaitContent("apps.api: api-1=[10.0.1.1]; " + twoPods)
	// Later the rest of the Trench takes effect, here in a pod without a file.
	k.stop()
	harness.Must(t, os.Remove(f.file))
	k = f.run(nil)
	f.awaitContent(twoPods)
	await.True(t, "the Trench names the namespace", func() bool {
		problems := k.status().GetVerdict().GetProblems()
		return len(problems) == 1 && problems[0].GetReason() == "Unreadable" &&
			strings.Contains(problems[0].GetMessage(), "in namespace closed")
	})
	k.awaitCurrent()

	f.patch(trenchResource, "trench-a", `{"spec":{"namespaces":["trench-a"]}}`)
	await.True(t, "no cache is of another namespace", func() bool {
		return !slices.ContainsFunc(k.cluster.Caches(), func(c cluster.Cache) bool {
			return strings.Contains(c.What, "apps") || strings.Contains(c.What, "closed")
		})
	})
	f.awaitContent(twoPods)
	k.awaitCurrent()
}

func TestAPIServerKeyFiles(t *testing.T) {
	f := newFixture(t)
	k := f.run(nil)
	f.awaitContent("trench-a.web:")
	key := func() string {
		names, _ := filepath.Glob(filepath.Join(k.KeyDir, "*"))
		var all []string
		for _, name := range names {
			content, _ := os.ReadFile(name)
			info, err := os.Stat(name)
			if err == nil && info.Mode().Perm() != keyMode {
				t.Errorf("%s has mode %v", name, info.Mode())
			}
			all = append(all, string(content))
		}
		return strings.Join(all, " ")
	}
	secret := "apiVersion: v1\nkind: Secret\nmetadata: {name: gw-1, namespace: trench-a}\nstringData: {password: WORD}"
	f.Apply(t, strings.Replace(secret, "WORD", "first", 1))
	gateways := `{"spec":{"attractor":{"gateways":[{"name":"gw-1","address":"169.254.100.150","remoteASN":64512%s}]}}}`
	with := strings.Replace(gateways, "%s", `,"passwordSecret":{"name":"gw-1","key":"password"}`, 1)
	f.patch(trenchResource, "trench-a", with)
	await.True(t, "key file", func() bool {
		content, err := os.ReadFile(f.file)
		return err == nil && key() == "first" && strings.Contains(string(content), k.KeyDir)
	})
	before := f.stamp()
	f.Apply(t, strings.Replace(secret, "WORD", "second", 1))
	await.True(t, "key file of the new password", func() bool { return key() == "second" })
	f.wantSame(before)
	f.patch(trenchResource, "trench-a", strings.Replace(gateways, "%s", "", 1))
	await.True(t, "no key file", func() bool { return key() == "" })
}

func TestAPIServerPodsChange(t *testing.T) {
	f := newFixture(t)
	f.run(nil)
	f.addPod("trench-a", "web-1", "10.0.0.1")
	f.awaitContent(onePod)
	f.patch(podResource, "web-1", `{"status":{"conditions":[{"type":"Ready","status":"False"}]}}`, "status")
	f.awaitContent("trench-a.web:")
	f.patch(podResource, "web-1", `{"status":{"conditions":[{"type":"Ready","status":"True"}]}}`, "status")
	f.awaitContent(onePod)
	f.remove(podResource, "web-1", 30)
	f.awaitContent(onePod + "!")
	f.remove(podResource, "web-1", 0)
	f.awaitContent("trench-a.web:")
	f.remove(serviceResource, "web", 0)
	f.awaitContent("")
}

func TestAPIServerNothingTwice(t *testing.T) {
	f, k := withPod(t)
	before := f.stamp()
	k.stop()
	f.wantSame(before)
	k = f.run(nil)
	await.True(t, "a translation", func() bool { return k.status().GetFile().GetTranslations() > 0 })
	f.patch(podResource, "web-1", `{"metadata":{"annotations":{"other":"x"}}}`)
	await.True(t, "another translation", func() bool { return k.status().GetFile().GetTranslations() > 1 })
	f.wantSame(before)
}
