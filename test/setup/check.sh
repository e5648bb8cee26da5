#!/usr/bin/env bash
# The quick check before a commit: unit tests, without the race detector, of the packages that changed
# since the base commit and of their importers; style, format, generated files.
set -euo pipefail
cd "$(dirname "$0")/../.."
. test/setup/stages.sh
. test/setup/changes.sh

export VIPGATE_TEST_KUBE=0 RAPID_SEED="${RAPID_SEED:-1}" RAPID_CHECKS="${RAPID_CHECKS:-30}"
changes=$(changed_files)
go_files=$(grep '\.go$' <<<"$changes" | while read -r file; do [ ! -e "$file" ] || echo "$file"; done || true)

# affected prints the unit tests' packages that are changed, or import a changed one, also in tests.
affected() {
	local folders
	folders=$(grep -E '^(cmd|pkg|test)/' <<<"$changes" | sed 's|/testdata/.*|/x|; s|/[^/]*$||; s|^|github.com/vipgate/vipgate/|' | sort -u)
	[ -n "$folders" ] || return 0
	go list -e -test -f '{{.ImportPath}} {{join .Deps " "}}' ./pkg/... ./cmd/... ./test/... |
		awk -v folders="$folders" '
			BEGIN { n = split(folders, f, "\n"); for (i = 1; i <= n; i++) changed[f[i]] = 1 }
			sub(/\.test$/, "", $1) { for (i = 1; i <= NF; i++) if ($i in changed) { print $1; next } }' |
		grep -vE '/test/(bench|birds|demo|docs|e2e|install|kube-e2e|kubernetes|node|replay|speakers|style)(/|$)|/test/lab$' || true
}

format() {
	local stale
	[ -n "$go_files" ] || return 0
	# shellcheck disable=SC2086 # one word for each file
	stale=$(test/setup/format.sh list $go_files) && [ -z "$stale" ] || {
		echo "not formatted (make format):" $stale
		return 1
	}
}

# shellcheck disable=SC2046 # one word for each package
units() { go test -vet=off -timeout 10m $(affected); }

stage "format" format
stage "style" go test ./test/style/...
# Generated files that no test compares are compared when their sources change.
if grep -qE '^(proto/|pkg/api/|buf|pkg/fastpath/)' <<<"$changes"; then
	stage "generated code" make --no-print-directory generated
fi
[ -z "$(affected)" ] || stage "unit tests" units
exit $status
