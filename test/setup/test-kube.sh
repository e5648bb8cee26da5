#!/usr/bin/env bash
# Runs the tests that need a Kubernetes API server. None is skipped.
set -euo pipefail
cd "$(dirname "$0")/../.."
. test/setup/stages.sh

test/setup/packages.sh demo test || echo "the tests of a package that is not installed fail"
VIPGATE_TEST_KUBE=1
VIPGATE_TEST_SKIPPED=$(mktemp)
export VIPGATE_TEST_KUBE VIPGATE_TEST_SKIPPED
export RAPID_SEED="${RAPID_SEED:-1}" RAPID_CHECKS="${RAPID_CHECKS:-30}"
export CGO_ENABLED=0 GOFLAGS="${GOFLAGS:-} -ldflags=-w"
stage "programs of the tests" test/setup/programs.sh
# The controller of frr-k8s renders the same text from the same files.
sha256sum --check --status test/e2e/testdata/frr-k8s/rendered.sha256 ||
	stage "controller of frr-k8s" make --no-print-directory bin/tools/frr-k8s-controller
[ $status = 0 ] || exit 1
export VIPGATE_TEST_BINARIES=$PWD/bin/test

# "make test" ran the other tests of these packages.
module=github.com/vipgate/vipgate
packages=$(go list -f '{{ .ImportPath }} {{ .TestImports }} {{ .XTestImports }}' ./cmd/... ./pkg/... ./test/kubernetes |
	sed -n "s|^\([^ ]*\) .*[[ ]$module/test/kubernetes[] ].*|\1|p")
# shellcheck disable=SC2086 # one word for each package
stage "API server, race detector" env CGO_ENABLED=1 go test -race -vet=off -count=1 -p 4 -run '^TestAPIServer' -timeout 15m $packages
stage "API server, manifests" go test -C tools/manifests -vet=off -count=1 -run '^TestAPIServer' .
stage "API server, end to end" go test -vet=off -count=1 -parallel "$((2 * $(nproc)))" -timeout 20m ./test/kube-e2e
if [ -s "$VIPGATE_TEST_SKIPPED" ]; then
	echo "NOT TESTED, because this machine lacks something:"
	sort -u "$VIPGATE_TEST_SKIPPED" | sed 's/^/  - /'
	status=1
fi
rm -f "$VIPGATE_TEST_SKIPPED"
exit $status
