package kubernetes

import (
	"crypto/x509"
	"crypto/x509/pkix"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/test/harness"
)

// MemberArgs returns the command of a further API server of the cluster, for another network
// namespace: it listens on every address there, and refuses clients without credentials. Its
// certificate, in a folder of the caller, has loopback addresses and the given ones.
func (c *Cluster) MemberArgs(t testing.TB, dir string, port int, addresses ...netip.Addr) []string {
	t.Helper()
	server := template(pkix.Name{CommonName: "kube-apiserver"})
	server.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	server.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback}
	for _, address := range addresses {
		server.IPAddresses = append(server.IPAddresses, address.AsSlice())
	}
	cert, key, err := c.ca.issue(server)
	harness.Must(t, err)
	certFile, keyFile := dir+"/server.crt", dir+"/server.key"
	harness.Must(t, os.WriteFile(certFile, cert, 0o600))
	harness.Must(t, os.WriteFile(keyFile, key, 0o600))
	replaced := []string{"--bind-address=", "--secure-port=", "--cert-dir=", "--tls-cert-file=", "--tls-private-key-file="}
	args := slices.DeleteFunc(c.serverArgs(), func(arg string) bool {
		return slices.ContainsFunc(replaced, func(flag string) bool { return strings.HasPrefix(arg, flag) })
	})
	return append(args, "--bind-address=::", "--secure-port="+strconv.Itoa(port), "--cert-dir="+dir,
		"--tls-cert-file="+certFile, "--tls-private-key-file="+keyFile, "--anonymous-auth=false")
}

// ClientFiles writes the certificate and the key of a user, and the certificate of the
// authority, into files of a folder of the caller, and returns their paths.
func (c *Cluster) ClientFiles(t testing.TB, dir, user string, groups ...string) (ca, cert, key string) {
	t.Helper()
	config := c.User(user, groups...)
	ca, cert, key = dir+"/ca.crt", dir+"/client.crt", dir+"/client.key"
	for path, content := range map[string][]byte{ca: config.CAData, cert: config.CertData, key: config.KeyData} {
		harness.Must(t, os.WriteFile(path, content, 0o600))
	}
	return ca, cert, key
}
