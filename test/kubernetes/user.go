package kubernetes

import (
	"context"
	"crypto/x509"
	"crypto/x509/pkix"
	"os"
	"path/filepath"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/vipgate/vipgate/test/harness"
)

// Admin returns the configuration of a client with all permissions (system:masters).
func (c *Cluster) Admin() *rest.Config { return rest.CopyConfig(c.admin) }

// User returns the configuration of a client with a certificate of a user and groups. Without a
// binding it only has access to discovery.
func (c *Cluster) User(name string, groups ...string) *rest.Config {
	c.t.Helper()
	config, err := c.user(name, groups)
	harness.Must(c.t, err)
	return config
}

func (c *Cluster) user(name string, groups []string) (*rest.Config, error) {
	t := template(pkix.Name{CommonName: name, Organization: groups})
	t.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	cert, key, err := c.ca.issue(t)
	if err != nil {
		return nil, err
	}
	config := c.anonymous()
	config.CertData, config.KeyData = cert, key
	return config, nil
}

// anonymous returns the configuration of a client without credentials and without a client-side
// rate limit.
func (c *Cluster) anonymous() *rest.Config {
	return &rest.Config{
		Host: "https://" + c.Address(), QPS: -1,
		TLSClientConfig: rest.TLSClientConfig{CAData: c.ca.pem},
	}
}

// Kubeconfig writes a configuration to a kubeconfig file in a folder of the test and returns its
// path. A token stays in a separate file, which clients read again after a change.
func (c *Cluster) Kubeconfig(t testing.TB, config *rest.Config) string {
	t.Helper()
	const name = "test"
	k := clientcmdapi.NewConfig()
	k.Clusters[name] = &clientcmdapi.Cluster{Server: config.Host, CertificateAuthorityData: config.CAData}
	k.AuthInfos[name] = &clientcmdapi.AuthInfo{
		ClientCertificateData: config.CertData, ClientKeyData: config.KeyData, TokenFile: config.BearerTokenFile,
	}
	k.Contexts[name] = &clientcmdapi.Context{Cluster: name, AuthInfo: name}
	k.CurrentContext = name
	path := filepath.Join(t.TempDir(), "kubeconfig")
	harness.Must(t, clientcmd.WriteToFile(*k, path))
	return path
}

// ServiceAccount returns the configuration of a client with a token of a service account, in a file
// as in a pod. The service account is created unless it exists; its namespace must exist. A second
// call writes another token into the same file.
func (c *Cluster) ServiceAccount(t testing.TB, namespace, name string) *rest.Config {
	t.Helper()
	return c.token(t, namespace, name, &authenticationv1.TokenRequest{}, namespace+"."+name)
}

// PodServiceAccount is ServiceAccount with a token that is bound to a Pod of the service account,
// as the kubelet mounts it.
func (c *Cluster) PodServiceAccount(t testing.TB, namespace, name, pod string) *rest.Config {
	t.Helper()
	core, err := typedcorev1.NewForConfig(c.admin)
	harness.Must(t, err)
	p, err := core.Pods(namespace).Get(context.Background(), pod, metav1.GetOptions{})
	harness.Must(t, err)
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
		BoundObjectRef: &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: pod, UID: p.UID},
	}}
	return c.token(t, namespace, name, request, namespace+"."+name+"."+pod)
}

// token writes a token of a service account to a file, and returns the configuration with it.
func (c *Cluster) token(t testing.TB, namespace, name string, request *authenticationv1.TokenRequest,
	file string,
) *rest.Config {
	t.Helper()
	core, err := typedcorev1.NewForConfig(c.admin)
	harness.Must(t, err)
	accounts, ctx := core.ServiceAccounts(namespace), context.Background()
	_, err = accounts.Create(ctx, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: name}},
		metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		t.Fatalf("failed to create service account %s/%s: %v", namespace, name, err)
	}
	token, err := accounts.CreateToken(ctx, name, request, metav1.CreateOptions{})
	if err != nil {
		t.Fatalf("failed to request a token of service account %s/%s: %v", namespace, name, err)
	}
	config := c.anonymous()
	config.BearerTokenFile = filepath.Join(c.dir, file+".token")
	harness.Must(t, os.WriteFile(config.BearerTokenFile+".new", []byte(token.Status.Token), 0o600))
	harness.Must(t, os.Rename(config.BearerTokenFile+".new", config.BearerTokenFile))
	return config
}

// Mount writes the files that the kubelet mounts into a pod of a service account, ca.crt and token,
// to a directory. A second call writes another token.
func (c *Cluster) Mount(t testing.TB, dir, namespace, name string) {
	t.Helper()
	config := c.ServiceAccount(t, namespace, name)
	token, err := os.ReadFile(config.BearerTokenFile)
	harness.Must(t, err)
	for file, content := range map[string][]byte{"ca.crt": config.CAData, "token": token} {
		path := filepath.Join(dir, file)
		harness.Must(t, os.WriteFile(path+".new", content, 0o600))
		harness.Must(t, os.Rename(path+".new", path))
	}
}
