package kubernetes

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"path/filepath"
	"testing"
	"time"
)

// Names of etcd's sockets, in its folder: etcd parses them as host and port.
const (
	clientSocket = "client:1"
	peerSocket   = "peer:1"
)

// etcdTimeout bounds a request to etcd.
const etcdTimeout = 30 * time.Second

// etcdURL returns the URL of etcd for kube-apiserver.
func (c *Cluster) etcdURL() string { return "unix://" + filepath.Join(c.dir, clientSocket) }

// startEtcd starts etcd and waits until it is healthy.
func (c *Cluster) startEtcd() (err error) {
	binary, err := findEtcd()
	if err != nil {
		return err
	}
	c.etcd, err = startProcess(c.dir, "etcd", binary,
		"--data-dir=etcd", "--unsafe-no-fsync", "--log-level=warn",
		"--listen-client-urls=unix://"+clientSocket, "--advertise-client-urls=unix://"+clientSocket,
		"--listen-peer-urls=unix://"+peerSocket, "--initial-advertise-peer-urls=unix://"+peerSocket,
		"--initial-cluster=default=unix://"+peerSocket)
	if err != nil {
		return err
	}
	client := c.etcdClient()
	defer client.CloseIdleConnections()
	return c.etcd.ready(func(ctx context.Context) error { return get(ctx, client, "http://etcd/health") })
}

// etcdClient returns a client of etcd's JSON gateway.
func (c *Cluster) etcdClient() *http.Client {
	return &http.Client{Timeout: etcdTimeout, Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", filepath.Join(c.dir, clientSocket))
		},
	}}
}

// Compact compacts every revision that a client can know: a watch that resumes is answered with
// 410 Gone. It restarts the API server, because the watch cache still answers for compacted
// revisions.
func (c *Cluster) Compact(t testing.TB) {
	t.Helper()
	c.StopServer(t)
	if err := c.compact(); err != nil {
		t.Fatalf("failed to compact etcd: %v", err)
	}
	c.StartServer(t)
}

func (c *Cluster) compact() error {
	client := c.etcdClient()
	defer client.CloseIdleConnections()
	// The write creates a revision that is newer than the revision of each object. The gateway
	// encodes bytes in base64 and 64-bit numbers as strings.
	var put struct {
		Header struct {
			Revision string `json:"revision"`
		} `json:"header"`
	}
	key := []byte("/vipgate/compaction")
	if err := post(client, "put", map[string]any{"key": key, "value": key}, &put); err != nil {
		return err
	}
	return post(client, "compaction", map[string]any{"revision": put.Header.Revision, "physical": true}, nil)
}

// Prefixes of the API server's keys.
const (
	registry    = "/registry/"
	apiServices = registry + "apiregistration.k8s.io/apiservices/"
)

// keys returns the keys with a prefix, in their order.
func keys(client *http.Client, prefix string) ([]string, error) {
	var found struct {
		KVs []struct {
			Key []byte `json:"key"`
		} `json:"kvs"`
	}
	end := []byte(prefix)
	end[len(end)-1]++
	request := map[string]any{"key": []byte(prefix), "range_end": end, "keys_only": true}
	if err := post(client, "range", request, &found); err != nil {
		return nil, err
	}
	var all []string
	for _, kv := range found.KVs {
		all = append(all, string(kv.Key))
	}
	return all, nil
}

// deleteRange deletes the keys from first to last.
func deleteRange(client *http.Client, first, last string) error {
	return post(client, "deleterange", map[string]any{"key": []byte(first), "range_end": []byte(last + "\x00")}, nil)
}

// post calls a method of etcd's KV service; answer may be nil.
func post(client *http.Client, method string, request, answer any) error {
	body, err := json.Marshal(request)
	if err != nil {
		return fmt.Errorf("%s: %w", method, err)
	}
	response, err := client.Post("http://etcd/v3/kv/"+method, "application/json", bytes.NewReader(body))
	if err != nil {
		return fmt.Errorf("%s: %w", method, err)
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", method, response.Status)
	}
	if answer == nil {
		return nil
	}
	if err := json.NewDecoder(response.Body).Decode(answer); err != nil {
		return fmt.Errorf("%s: %w", method, err)
	}
	return nil
}
