#!/usr/bin/env bash
# Runs the tests that need a Kubernetes API server. None is skipped.
set -euo pipefail

lacking=0
need() { command -v "$1" >/dev/null || [ -x "/usr/sbin/$1" ] || {
	echo "missing: $1 (Debian: apt-get install $2)"
	lacking=1
}; }
need bird bird2
need ip iproute2
need nft nftables
need gcc gcc
[ $lacking = 0 ] || exit 1

VIPGATE_TEST_KUBE=1
VIPGATE_TEST_SKIPPED=$(mktemp)
export VIPGATE_TEST_KUBE VIPGATE_TEST_SKIPPED
trap 'rm -f "$VIPGATE_TEST_SKIPPED"' EXIT
export RAPID_SEED="${RAPID_SEED:-1}"
status=0
echo "== against an API server, with the race detector"
go test -race -count=1 -p 1 -timeout 15m ./test/kubernetes/... ./cmd/kube/... ./pkg/kube/... || status=1
echo "== the manifests, against an API server"
(cd tools/manifests && go test -count=1 -run TestAPIServer .) || status=1
echo "== end to end: an API server, kube, lb, frontend and real BIRD"
go test -count=1 -timeout 20m ./test/kube-e2e/... || status=1
if [ -s "$VIPGATE_TEST_SKIPPED" ]; then
	echo "NOT TESTED, because this machine lacks something:"
	sort -u "$VIPGATE_TEST_SKIPPED" | sed 's/^/  - /'
	status=1
fi
exit $status
