package kubernetes

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/harness"
)

// gatewayModule is the module with the CustomResourceDefinitions of the Gateway API, in the version
// that tools/gateway-api/go.mod pins.
const gatewayModule = "sigs.k8s.io/gateway-api"

// downloadTimeout bounds the download of a module.
const downloadTimeout = 5 * time.Minute

// GatewayAPI returns the CustomResourceDefinition of Gateways, for Apply.
func GatewayAPI(t testing.TB) string {
	t.Helper()
	root, err := repository()
	harness.Must(t, err)
	ctx, cancel := context.WithTimeout(context.Background(), downloadTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, "go", "mod", "download", "-json", gatewayModule)
	cmd.Dir = filepath.Join(root, "tools/gateway-api")
	out, err := cmd.Output()
	var module struct{ Dir, Error string }
	if parsed := json.Unmarshal(out, &module); parsed != nil || module.Error != "" {
		t.Fatalf("failed to download %s: %v %v %s", gatewayModule, err, parsed, module.Error)
	}
	text, err := os.ReadFile(filepath.Join(module.Dir, "config/crd/standard/gateway.networking.k8s.io_gateways.yaml"))
	if err != nil {
		t.Fatal(fmt.Errorf("CustomResourceDefinition of Gateways: %w", err))
	}
	return string(text)
}
