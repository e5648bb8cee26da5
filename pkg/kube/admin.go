package kube

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	kubev1 "github.com/vipgate/vipgate/pkg/api/kube/v1"
	"github.com/vipgate/vipgate/pkg/endpoint"
	"github.com/vipgate/vipgate/pkg/kube/publication"
	"github.com/vipgate/vipgate/pkg/kube/translation"
	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
	"github.com/vipgate/vipgate/pkg/logs"
	"github.com/vipgate/vipgate/pkg/metrics"
	"github.com/vipgate/vipgate/pkg/vip"
)

type admin struct {
	kubev1.UnsafeKubeServiceServer
	endpoint.StatusServer[kubev1.Status, struct{}]
}

func newAdmin(p *process) *admin {
	read := func(context.Context) *kubev1.Status { return p.status() }
	return &admin{StatusServer: endpoint.StatusServer[kubev1.Status, struct{}]{Read: read, Changes: &p.changed}}
}

func (p *process) status() *kubev1.Status {
	// Copy the counters: the agent must not wait for a status or a scrape.
	p.mu.Lock()
	counts := p.counts
	p.mu.Unlock()
	state, evaluated := p.cluster.State().Load(), p.evaluated.Load()
	s := &kubev1.Status{
		Version: p.Version, Namespace: p.Namespace, Trench: cmp.Or(p.Trench, p.Gateway), Pod: p.PodName,
		ApiServer: p.Config.Host, Conditions: p.health.Conditions(),
		SyncedSince: endpoint.Timestamp(state.Synced),
		StaleSince:  endpoint.Timestamp(state.Stale.Since), StaleCause: state.Stale.Cause,
		File: &kubev1.TrenchFile{
			Path: p.TrenchFile, Written: endpoint.Timestamp(counts.written), Writes: counts.writes,
			Translations: counts.translations, Error: logs.Text(counts.err),
		},
	}
	// A cache that fails shows why the trench file is stale.
	for _, c := range p.cluster.Caches() {
		s.Caches = append(s.Caches, &kubev1.Cache{
			What: c.What, Synced: c.Synced, Objects: uint32(c.Objects),
			FailingSince: endpoint.Timestamp(c.Failure.Since), Error: c.Failure.Cause,
		})
	}
	if p.publisher != nil {
		// The Lease of a deleted pod names that pod until another one acquires it.
		leads := p.publisher.State().Load()
		exists := slices.ContainsFunc(evaluated.Siblings, func(pod *corev1.Pod) bool { return pod.Name == leads.Leader })
		if leads.Leading || exists {
			s.Leader = leads.Leader
		}
	}
	// Until the first translation, an empty verdict would look like a refusal.
	if counts.translations == 0 {
		return s
	}
	s.Publication = publicationOf(evaluated)
	s.Verdict = verdict(evaluated.Result.Trench)
	for _, v := range evaluated.Result.Services {
		service := &kubev1.ServiceVerdict{
			Verdict: verdict(v.Verdict), Stream: v.Stream, Targets: uint32(v.Targets),
			Vips: vip.Texts(v.VIPs),
		}
		s.Services = append(s.Services, service)
	}
	return s
}

// publicationOf returns the condition Published of the Trench, or nil if it is not set.
func publicationOf(in publication.Input) *kubev1.Publication {
	if in.Objects.Trench == nil {
		return nil
	}
	trench, err := v1alpha1.FromUnstructured(in.Objects.Trench)
	if err != nil {
		return nil // the verdict has the cause
	}
	c := meta.FindStatusCondition(trench.Status.Conditions, v1alpha1.Published)
	if c == nil {
		return nil
	}
	return &kubev1.Publication{
		Complete: c.Status == metav1.ConditionTrue, Reason: c.Reason, Message: c.Message,
	}
}

func verdict(v translation.Verdict) *kubev1.Verdict {
	all := &kubev1.Verdict{Object: name(v.Object), Accepted: v.Accepted, Reason: v.Reason, Message: v.Message}
	for _, p := range v.Problems {
		all.Problems = append(all.Problems,
			&kubev1.Problem{Object: name(p.Object), Reason: p.Reason, Message: p.Message, Warning: p.Warning()})
	}
	return all
}

// name returns a reference as "Service trench-a/web".
func name(o corev1.ObjectReference) string {
	return strings.TrimSpace(o.Kind + " " + strings.TrimPrefix(o.Namespace+"/"+o.Name, "/"))
}

func (p *process) metricState() metrics.KubeState {
	p.mu.Lock()
	counts := p.counts
	p.mu.Unlock()
	// Each kind is exported from the start, so that no series vanishes.
	m := metrics.KubeState{
		Writes: counts.writes, WriteFailures: counts.failures, Written: counts.written,
		APIErrors: p.cluster.Errors(), Objects: map[string]int{},
		Refused: map[string]int{"Trench": 0, "Service": 0, "Pod": 0},
	}
	if since := p.cluster.State().Load().Stale.Since; !since.IsZero() {
		m.Stale = time.Since(since)
	}
	for _, c := range p.cluster.Caches() {
		m.Objects[c.Kind] += c.Objects
	}
	if counts.translations == 0 {
		return m
	}
	for object := range p.evaluated.Load().Result.Refused() {
		m.Refused[object.Kind]++
	}
	return m
}
