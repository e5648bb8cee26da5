#!/usr/bin/env bash
# Checks the contracts for breaking changes against main, where it is known.
set -euo pipefail
buf=$1
for ref in origin/main main; do
	if commit=$(git rev-parse --verify --quiet "$ref^{commit}") && git cat-file -e "$commit:proto" 2>/dev/null; then
		dir=$(mktemp -d)
		trap 'rm -rf "$dir"' EXIT
		git archive "$commit" proto buf.yaml | tar -x -C "$dir"
		"$buf" breaking --against "$dir"
		exit 0
	fi
done
echo "  no main to compare with"
