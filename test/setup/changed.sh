#!/usr/bin/env bash
# Runs the tests that CI leaves to "make proof", unless their files changed since the base commit. With
# "all" it runs every one.
set -euo pipefail
cd "$(dirname "$0")/../.."
. test/setup/stages.sh
. test/setup/changes.sh

all=${1:-}
changes=$(changed_files)
# touched PATTERN reports whether a changed file matches.
touched() { [ "$all" = all ] || grep -qE "^($1)" <<<"$changes"; }
installation() {
	test/setup/packages.sh install
	test/setup/test.sh ./test/install
}
versions() {
	local with
	with=$(grep -lE 'lab\.(BIRDs|NewerBIRD)\(' test/e2e/*_test.go |
		xargs awk '/^func Test/ { sub(/\(.*/, "", $2); name = $2 } /lab\.(BIRDs|NewerBIRD)\(/ { print name }' | sort -u | paste -sd'|')
	local result=0
	VIPGATE_TEST_BIRDS=all RUN="" test/setup/test.sh ./test/birds ./test/speakers || result=1
	VIPGATE_TEST_BIRDS=all RUN="^(${with:?})\$" test/setup/test.sh ./test/e2e || result=1
	return $result
}
site() {
	test/setup/packages.sh site
	go test -vet=off -count=1 -run '^TestSite$' ./test/docs
}

touched 'test/lab/' && stage "topology of the lab" test/setup/test.sh ./test/lab
touched 'pkg/bird/|test/birds/|test/setup/birds.sh' && stage "other versions of BIRD" versions
touched 'test/replay/' && stage "replay of three incidents" test/setup/test.sh ./test/replay
touched 'test/bench/' && stage "every row of the benchmark" make bench-quick
touched 'test/install/|docs/install.md|tools/release/|test/setup/|Makefile|README.md' && stage "installation" installation
touched 'tools/site/|docs/.*\.md' && stage "documentation site" site
packages=$(grep -rl --include='*_test.go' '^func Fuzz' cmd pkg test | xargs -r -d '\n' -n 1 dirname | sort -u)
if [ "$all" != all ]; then # which has its own fuzzing, for longer
	packages=$(for package in $packages; do touched "$package/[^/]*\.go" && echo "$package"; done || true)
	[ -z "$packages" ] || stage "fuzzing" env FUZZ_PACKAGES="$packages" test/setup/fuzz.sh 1s
fi
exit $status
