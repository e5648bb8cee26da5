package readiness

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"math/big"
	"syscall"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"google.golang.org/grpc/credentials"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
)

// BenchmarkCommitToReceipt measures the time from a decision about one VIP among n to its receipt
// by the consumer of a watcher, over a real unix socket.
func BenchmarkCommitToReceipt(b *testing.B) {
	for _, n := range []int{1, 1000, 50_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			lb := startSyncedLB(b, n)
			f := startFrontend(b, lb.path, nil)
			f.waitFor(b, "synced", f.at(lb.table))
			deadline := time.NewTimer(time.Minute)
			defer deadline.Stop()
			for i := 0; b.Loop(); i++ {
				revision := lb.table.Commit(Decision{Changed: []VIPReadiness{{VIP: numbered(0), State: vip.State(i % 2)}}})
				for {
					select {
					case <-f.Changed():
					case <-deadline.C:
						b.Fatal("not received")
					}
					if u := f.Take(); u.Position.Revision == revision {
						break
					}
				}
				deadline.Reset(time.Minute)
			}
		})
	}
}

// BenchmarkReport measures the time from a report about one VIP among n to its receipt by the load
// balancer.
func BenchmarkReport(b *testing.B) {
	for _, n := range []int{1, 50_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			lb := startSyncedLB(b, 1)
			f := startFrontend(b, lb.path, nil)
			var all ReportDelta
			for i := range n {
				all.VIPs = append(all.VIPs, ReportedVIP{numbered(i), VIPReport{Advertisement: announced}})
			}
			f.Report(all)
			await.True(b, "reported", func() bool { return lb.Report().Load().Advertised == n })
			for i := uint64(1); b.Loop(); i++ {
				_, changed := lb.Report().Get()
				f.Report(ReportDelta{
					Applied: Position{"i", i},
					VIPs:    reportsOf(map[vip.VIP]VIPReport{numbered(0): {Advertisement: announced, Unconfirmed: i%2 == 0}}),
				})
				for lb.Report().Load().Applied.Revision != i {
					<-changed
					_, changed = lb.Report().Get()
				}
			}
		})
	}
}

// BenchmarkSnapshot measures a reconnect with n VIPs, until the consumer has all.
func BenchmarkSnapshot(b *testing.B) {
	lb := startSyncedLB(b, 50_000)
	for b.Loop() {
		f := startFrontend(b, lb.path, nil)
		f.waitFor(b, "synced", f.at(lb.table))
		f.stop()
	}
}

// BenchmarkMassChange measures a decision about all of n VIPs until the consumer of a watcher has
// it, over mTLS on a real unix socket. cpu-ns/op is the processor time of both sides.
func BenchmarkMassChange(b *testing.B) {
	for _, n := range []int{1000, 10_000, 50_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			lb, credentials := startTLSLB(b)
			rs := numberedReady(n)
			lb.table.Commit(Decision{Changed: rs, Synced: true})
			sendHeartbeats(b, lb.table)
			f := startFrontend(b, lb.path, func(o *WatcherOptions) { o.Credentials = credentials })
			f.waitFor(b, "synced", f.at(lb.table))
			deadline := time.NewTimer(time.Minute)
			defer deadline.Stop()
			cpu := processorTime(b)
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				for j := range rs {
					rs[j].State, rs[j].Detail = vip.State(i%2), ""
					if i%2 == 0 {
						rs[j].Detail = "1 of 2 targets are ready, 2 required; last error: connect: connection refused"
					}
				}
				revision := lb.table.Commit(Decision{Changed: rs})
				for {
					select {
					case <-f.Changed():
					case <-deadline.C:
						b.Fatal("not received")
					}
					if u := f.Take(); u.Position.Revision == revision {
						break
					}
				}
				deadline.Reset(time.Minute)
			}
			b.ReportMetric(float64(processorTime(b)-cpu)/float64(b.N), "cpu-ns/op")
		})
	}
}

// processorTime returns the processor time of the process.
func processorTime(b *testing.B) time.Duration {
	b.Helper()
	var r syscall.Rusage
	harness.Must(b, syscall.Getrusage(syscall.RUSAGE_SELF, &r))
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

// startTLSLB serves an empty table over mTLS, and returns the credentials of its clients.
func startTLSLB(b *testing.B) (*testLB, credentials.TransportCredentials) {
	b.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	harness.Must(b, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), DNSNames: []string{"localhost"}, NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	harness.Must(b, err)
	certificate, err := x509.ParseCertificate(der)
	harness.Must(b, err)
	roots := x509.NewCertPool()
	roots.AddCert(certificate)
	c := credentials.NewTLS(&tls.Config{
		Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}},
		RootCAs:      roots, ClientCAs: roots, ClientAuth: tls.RequireAndVerifyClientCert, MinVersion: tls.VersionTLS13,
	})
	lb := &testLB{table: NewTable(TableOptions{}), path: socketPath(b), log: &harness.Log{}}
	lb.Server = NewServer(lb.table, ServerOptions{
		Peer: func(context.Context) (spiffeid.ID, bool) { return frontendID, true },
		Role: RolesOf([]spiffeid.ID{frontendID}, nil), Log: lb.log.Logger(),
	})
	lb.kill = serveGRPC(b, lb.path, lb.Server, c)
	return lb, c
}

// BenchmarkMassReport measures a report about all of n VIPs until the load balancer has it, over
// mTLS on a real unix socket. cpu-ns/op is the processor time of both sides.
func BenchmarkMassReport(b *testing.B) {
	for _, n := range []int{1000, 10_000, 50_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			lb, credentials := startTLSLB(b)
			lb.table.Commit(Decision{Changed: numberedReady(1), Synced: true})
			sendHeartbeats(b, lb.table)
			f := startFrontend(b, lb.path, func(o *WatcherOptions) { o.Credentials = credentials })
			f.waitFor(b, "synced", f.at(lb.table))
			var list [2][]ReportedVIP
			for j := range list {
				for i := range n {
					report := VIPReport{Advertisement: readinessv1.Advertisement(j + 1)}
					list[j] = append(list[j], ReportedVIP{numbered(i), report})
				}
			}
			cpu := processorTime(b)
			b.ReportAllocs()
			for i := uint64(1); b.Loop(); i++ {
				_, changed := lb.Report().Get()
				f.Report(ReportDelta{Applied: Position{"i", i}, VIPs: list[i%2]})
				for lb.Report().Load().Applied.Revision != i {
					<-changed
					_, changed = lb.Report().Get()
				}
			}
			b.ReportMetric(float64(processorTime(b)-cpu)/float64(b.N), "cpu-ns/op")
		})
	}
}
