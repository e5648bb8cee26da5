#!/usr/bin/env bash
# Fails when pkg/api is not what buf makes of proto/.
set -euo pipefail
tools=$PWD/$1
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
PATH="$tools:$PATH" "$tools/buf" generate -o "$dir"
diff -r "$dir/pkg/api" pkg/api || {
	echo "pkg/api is stale: run make generate" >&2
	exit 1
}
