package kubernetes

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"time"
)

// authority signs the certificates of the API server and of its users.
type authority struct {
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte // certificate of the authority
}

// newAuthority writes the files of the API server into dir: ca.crt, server.crt, server.key,
// kubelet-client.crt and kubelet-client.key for kubelets, and sa.key, which signs the tokens of
// service accounts. The certificate of the server contains the
// address node, if it is valid, and the address of the Service kubernetes.
func newAuthority(dir string, node netip.Addr) (*authority, error) {
	a := &authority{dir: dir}
	var err error
	if a.key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
		return nil, fmt.Errorf("key of the authority: %w", err)
	}
	root := template(pkix.Name{CommonName: "vipgate test"})
	root.IsCA, root.BasicConstraintsValid, root.KeyUsage = true, true, x509.KeyUsageCertSign
	der, err := x509.CreateCertificate(rand.Reader, root, root, a.key.Public(), a.key)
	if err != nil {
		return nil, fmt.Errorf("certificate of the authority: %w", err)
	}
	if a.cert, err = x509.ParseCertificate(der); err != nil {
		return nil, fmt.Errorf("certificate of the authority: %w", err)
	}
	a.pem = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})

	server := template(pkix.Name{CommonName: "kube-apiserver"})
	server.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	server.DNSNames, server.IPAddresses = []string{"localhost"}, []net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback}
	if node.IsValid() {
		server.IPAddresses = append(server.IPAddresses, node.AsSlice(), net.IPv4(10, 96, 0, 1))
	}
	cert, key, err := a.issue(server)
	if err != nil {
		return nil, err
	}
	_, serviceAccounts, err := a.issue(template(pkix.Name{CommonName: "service accounts"}))
	if err != nil {
		return nil, err
	}
	client := template(pkix.Name{CommonName: "kube-apiserver-kubelet-client", Organization: []string{"system:masters"}})
	client.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	clientCert, clientKey, err := a.issue(client)
	if err != nil {
		return nil, err
	}
	for name, content := range map[string][]byte{
		"kubelet-client.crt": clientCert, "kubelet-client.key": clientKey,
		"ca.crt": a.pem, "server.crt": cert, "server.key": key, "sa.key": serviceAccounts,
	} {
		if err := os.WriteFile(a.path(name), content, 0o600); err != nil {
			return nil, err
		}
	}
	return a, nil
}

// path returns the path of a file of the authority.
func (a *authority) path(name string) string { return filepath.Join(a.dir, name) }

// template returns a certificate that is valid for a day.
func template(subject pkix.Name) *x509.Certificate {
	return &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()),
		Subject:      subject,
		NotBefore:    time.Now().Add(-time.Minute),
		NotAfter:     time.Now().Add(24 * time.Hour),
		KeyUsage:     x509.KeyUsageDigitalSignature,
	}
}

// issue returns a signed certificate and its new key, in PEM.
func (a *authority) issue(t *x509.Certificate) (cert, key []byte, err error) {
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, fmt.Errorf("key of %s: %w", t.Subject.CommonName, err)
	}
	der, err := x509.CreateCertificate(rand.Reader, t, a.cert, private.Public(), a.key)
	if err != nil {
		return nil, nil, fmt.Errorf("certificate of %s: %w", t.Subject.CommonName, err)
	}
	secret, err := x509.MarshalECPrivateKey(private)
	if err != nil {
		return nil, nil, fmt.Errorf("key of %s: %w", t.Subject.CommonName, err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: secret}), nil
}
