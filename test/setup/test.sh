#!/usr/bin/env bash
# Runs every test. What the machine lacks for some of them is listed at the end.
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

VIPGATE_TEST_SKIPPED=$(mktemp)
export VIPGATE_TEST_SKIPPED
trap 'rm -f "$VIPGATE_TEST_SKIPPED"' EXIT
# Those that need an API server run in "make test-kube".
export VIPGATE_TEST_KUBE=0
# The same sequences of the models in each run: another seed is set manually, or by "make proof".
export RAPID_SEED="${RAPID_SEED:-1}"
status=0
processors=$(nproc)
# The tests wait for timers of BGP and of BIRD more than they compute.
echo "== unit tests, with the race detector"
go test -race -p $((2 * processors)) -timeout 10m ./pkg/... ./cmd/... ./test/lab/... ./test/load/... ./test/birds ./test/speakers || status=1
# Never from the cache, which does not know the programs that they build.
echo "== end to end: real BIRD, real wires; the demo, the documents, the benchmark, the package"
go test -count=1 -p 2 -parallel $((2 * processors)) -timeout 30m ./test/e2e/... ./test/demo/... ./test/docs/... \
	./test/bench ./test/replay ./test/install || status=1
echo
kube=$(grep -c 'make test-kube' "$VIPGATE_TEST_SKIPPED" || true)
[ "$kube" = 0 ] || echo "make test-kube runs $kube more tests, which need an API server"
sed -i '/make test-kube/d' "$VIPGATE_TEST_SKIPPED"
if [ -s "$VIPGATE_TEST_SKIPPED" ]; then
	echo "NOT TESTED, because this machine lacks something:"
	sort -u "$VIPGATE_TEST_SKIPPED" | sed 's/^/  - /'
else
	echo "every other test ran: nothing was skipped"
fi
exit $status
