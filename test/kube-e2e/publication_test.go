package kubee2e

import (
	"context"
	"fmt"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// lateService gets its address from the Trench.
const lateService = `
apiVersion: v1
kind: Service
metadata: {name: web, namespace: trench-a, annotations: {vipgate.io/vips: 20.0.0.1}}
spec:
  type: LoadBalancer
  loadBalancerClass: vipgate.io/trench-a
  allocateLoadBalancerNodePorts: false
  selector: {app: web}
  ports: [{port: 8080}]
`

// concurrent is the number of concurrent writes of a leader, see publication.writers.
const concurrent = 8

// A stopped leader, and a leader whose Lease was deleted, writes nothing after it has read the
// next holder, although most of its writes are pending.
func TestOneLeader(t *testing.T) {
	const sites = 300
	p := newPublishers(t, 2, sites, ingressStatus)
	p.awaitPublished("192.0.2.1")

	// The Lease is deleted, and the second pod creates it first.
	leader, other := p.leader()
	p.publish("192.0.2.2")
	p.awaitWrites(leader.name, "192.0.2.2", 150) // the burst of the rate limit is over
	p.must(leader.Signal(unix.SIGSTOP))
	p.must(p.leases.Delete(t.Context(), "vipgate-trench-a", metav1.DeleteOptions{}))
	p.awaitHolder(other)
	p.must(leader.Signal(unix.SIGCONT))
	p.awaitLeaderOf(leader, other)
	p.awaitPublished("192.0.2.2")
	all := p.requests()
	created := find(t, all, func(r request) bool {
		return r.user == other.name && r.resource == "leases" && r.verb == "create" && r.code == 201
	})
	read := find(t, all, func(r request) bool {
		return r.user == leader.name && r.resource == "leases" && r.verb == "get" && r.received.After(created.done)
	})
	late := after(statusWrites(all, leader.name, "ingresses", ""), read.done)
	t.Logf("Lease deleted: the old leader sent %d writes between both terms",
		len(after(statusWrites(all, leader.name, "ingresses", ""), created.done)))
	// Until the answer arrives, the end of a write begins another one.
	if len(late) > 2*concurrent {
		t.Errorf("%d writes after the old leader read the new holder", len(late))
	}

	// The process is stopped until the second pod holds the Lease.
	leader, other = p.leader()
	p.publish("192.0.2.3")
	p.awaitWrites(leader.name, "192.0.2.3", 150)
	p.must(leader.Signal(unix.SIGSTOP))
	p.awaitHolder(other)
	p.publish("192.0.2.4")
	p.awaitPublished("192.0.2.4")
	stopped := time.Now()
	p.must(leader.Signal(unix.SIGCONT))
	p.awaitLeaderOf(leader, other)
	late = after(statusWrites(p.requests(), leader.name, "ingresses", ""), stopped)
	t.Logf("process stopped: the old leader sent %d writes", len(late))
	if len(late) > concurrent {
		t.Errorf("%d writes of the process that was stopped", len(late))
	}
	for _, r := range late {
		if r.code < 300 {
			t.Errorf("the API server accepted an outdated write of Ingress %s", r.name)
		}
	}
}

// While a thousand Ingresses change, a new Service gets its status first, and outdated status of
// Ingresses is not written.
func TestNewServiceDuringManyWrites(t *testing.T) {
	const sites = 1000
	p := newPublishers(t, 1, sites, ingressStatus)
	p.awaitPublished("192.0.2.1")
	p.publish("192.0.2.2")
	p.awaitWrites("", "192.0.2.2", 150) // the burst of the rate limit is over
	p.apply(lateService)
	p.wait(func(ctx context.Context) error {
		s, err := p.core.Services(namespace).Get(ctx, serviceName, metav1.GetOptions{})
		if err == nil && len(s.Status.LoadBalancer.Ingress) == 0 {
			err = fmt.Errorf("the Service has no address")
		}
		return err
	})
	all := p.requests()
	created := find(t, all, func(r request) bool { return r.resource == "services" && r.name == serviceName })
	written := find(t, all, func(r request) bool { return r.resource == "services/status" && r.name == serviceName })
	t.Logf("the first status of the Service is written %v after its creation", written.received.Sub(created.done))
	before := 0
	for _, r := range after(statusWrites(all, "", "ingresses", ""), created.done) {
		if r.received.Before(written.received) {
			before++
		}
	}
	if left := sites - 150; before > left/4 {
		t.Errorf("%d of %d writes of Ingresses came before the Service", before, left)
	}
	p.publish("192.0.2.3")
	p.awaitPublished("192.0.2.3")
	all = p.requests()
	first := statusWrites(all, "", "ingresses", "192.0.2.3")[0]
	if n := len(after(statusWrites(all, "", "ingresses", "192.0.2.2"), first.done)); n > concurrent {
		t.Errorf("%d writes of the outdated address", n)
	}
	if n := len(statusWrites(all, "", "ingresses", "192.0.2.3")); n > sites+concurrent {
		t.Errorf("%d writes of the last address to %d Ingresses", n, sites)
	}
}

// While a status is rejected, the health service Publication stays NOT_SERVING, and a new desired
// status does not wait for the back-off.
func TestRefusedStatus(t *testing.T) {
	p := newPublishers(t, 1, 1)
	p.wait(func(context.Context) error {
		if n := len(statusWrites(p.requests(), "", "ingresses", "")); n == 0 {
			return fmt.Errorf("no write of the Ingress")
		}
		return nil
	})
	health := p.watchHealth(p.pods[0], "Publication")
	p.wait(func(context.Context) error { return want(health(), healthv1.HealthCheckResponse_NOT_SERVING) })
	seen := len(health())
	p.awaitWrites("", "", 7) // without their bodies, as they are forbidden
	for _, s := range health()[seen:] {
		if s == healthv1.HealthCheckResponse_SERVING {
			t.Error("Publication is SERVING while a refused status waits")
		}
	}
	p.apply(ingressStatus)
	p.publish("192.0.2.2")
	published := time.Now()
	p.awaitPublished("192.0.2.2")
	took := time.Since(published)
	tries := statusWrites(p.requests(), "", "ingresses", "")
	gap := tries[6].received.Sub(tries[5].received)
	t.Logf("the new address took %v; the last two attempts of the old one have %v between them", took, gap)
	if took > gap {
		t.Errorf("the new address took %v, longer than the back-off of %v", took, gap)
	}
	p.wait(func(context.Context) error { return want(health(), healthv1.HealthCheckResponse_SERVING) })
}
