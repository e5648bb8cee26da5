#!/usr/bin/env bash
# test.sh TIER... runs tests; what the machine lacks for some of them is listed at the end.
#   unit     all packages, most with the race detector
#   core     end to end: the tests of the failure table of docs/architecture.md, each speaker once
#   rest     the other end-to-end tests, the demo, the documents
#   PACKAGE  a package, such as ./pkg/gate; of its tests those that RUN matches
# With VIPGATE_TEST_BIRDS=all, tests that run with each BIRD also run with newer ones than Debian's.
set -euo pipefail
cd "$(dirname "$0")/../.."
. test/setup/stages.sh

test/setup/packages.sh demo test || echo "the tests of a package that is not installed are skipped"
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
[ "${VIPGATE_TEST_BIRDS:-}" != all ] || test/setup/birds.sh

VIPGATE_TEST_SKIPPED=$(mktemp)
export VIPGATE_TEST_SKIPPED
# Those that need an API server run in "make test-kube".
export VIPGATE_TEST_KUBE=0
# The same sequences of the models in each run, and few: "make proof" has other seeds, and 1 000.
export RAPID_SEED="${RAPID_SEED:-1}" RAPID_CHECKS="${RAPID_CHECKS:-30}"
processors=$(nproc)
# minutes N is a bound for N minutes' work; VIPGATE_TEST_PATIENCE multiplies it for a slow machine.
minutes() { echo $(($1 * ${VIPGATE_TEST_PATIENCE:-1}))m; }
# Without debug information a test program is linked in three quarters of the time.
export GOFLAGS="${GOFLAGS:-} -ldflags=-w"
# Only the race detector needs cgo. With it, the programs and their packages would be built twice.
export CGO_ENABLED=0
race() { CGO_ENABLED=1 go test -race "$@"; }

# set_of NAME prints the packages of a set of test/style/testdata/imports.txt.
set_of() { sed -n "s/^set $1 //p" test/style/testdata/imports.txt | tr ' ' '\n' | sed 's|^|github.com/vipgate/vipgate/|'; }

# unit: a pure package has no goroutine, so that the race detector finds nothing in it.
unit() {
	local all pure
	# Other tiers and "make lint" have the rest. The topology of the lab is part of every end-to-end test.
	all=$(go list ./pkg/... ./cmd/... ./test/... |
		grep -vE '/test/(bench|birds|demo|docs|e2e|install|kube-e2e|kubernetes|node|replay|style)(/|$)|/test/lab$')
	pure=$(set_of pure)
	stage "unit tests, pure packages" go test -vet=off -timeout "$(minutes 10)" $(grep -xFf <(echo "$pure") <<<"$all")
	# The tests wait for timers of BGP and of BIRD more than they compute.
	stage "unit tests, race detector" race -vet=off -p $((2 * processors)) -timeout "$(minutes 10)" $(grep -vxFf <(echo "$pure") <<<"$all")
}

# end_to_end NAME PARALLEL FLAGS... never takes results from the cache, which does not know all programs.
# Most tests wait: with eight for each processor, these idle for half of the time in the failure table.
# The others compute more, and count requests that a busy machine answers late.
end_to_end() {
	stage "$1" go test -vet=off -count=1 -p 4 -parallel $(($2 * processors)) -timeout "$(minutes 30)" "${@:3}"
}

# core prints a pattern of the tests in the files that the failure table names, and of each speaker.
core() {
	local names='TestForeignBIRD|TestForeignFRR|TestForeignGoBGP|TestGatewayOfEachKindAvoidsDrainedPod' file
	for file in $(sed -n '/^## Failure table/,/^## Security/p' docs/architecture.md | awk -F'|' '{ print $5 }' |
		grep -o '`[a-z_]*`' | tr -d '`' | sort -u); do
		[ -f "test/e2e/${file}_test.go" ] || {
			echo "the failure table names $file, which is not in test/e2e" >&2
			return 1
		}
		names+="|$(sed -n 's/^func \(Test[A-Za-z0-9_]*\)(.*/\1/p' "test/e2e/${file}_test.go" | paste -sd'|')"
	done
	echo "^($names)\$"
}
core=$(core)

stage "programs of the tests" test/setup/programs.sh
[ $status = 0 ] || exit 1
export VIPGATE_TEST_BINARIES=$PWD/bin/test
for tier in "$@"; do
	case $tier in
	unit) unit ;;
	core) end_to_end "end to end, failure table" 8 ./test/e2e -run "$core" ;;
	rest)
		end_to_end "the others, demo, documents" 4 ./test/e2e ./test/demo/... ./test/docs/... ./test/bench -skip "$core|^TestSite\$"
		;;
	*) end_to_end "$tier" 4 "$tier" -run "${RUN:-.}" ;;
	esac
done
echo
kube=$(grep -c 'make test-kube' "$VIPGATE_TEST_SKIPPED" || true)
[ "$kube" = 0 ] || echo "make test-kube runs $kube more tests, which need an API server"
sed -i '/make test-kube/d' "$VIPGATE_TEST_SKIPPED"
if [ -s "$VIPGATE_TEST_SKIPPED" ]; then
	echo "NOT TESTED, because this machine lacks something:"
	sort -u "$VIPGATE_TEST_SKIPPED" | sed 's/^/  - /'
elif [ $status = 0 ]; then
	echo "all other tests of $* ran and passed: nothing was skipped"
fi
rm -f "$VIPGATE_TEST_SKIPPED"
exit $status
