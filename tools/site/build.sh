#!/usr/bin/env bash
# Builds the documentation site into OUT: this tree as OUT/main, each REVISION as OUT/REVISION.
# Usage: build.sh OUT [REVISION...], the newest release first
set -euo pipefail
export PYTHONDONTWRITEBYTECODE=1
out=$(realpath -m "$1")
shift
cd "$(dirname "$0")/../.."
# A dead link fails the build.
build() { VERSION=$2 mkdocs build --strict --config-file="$1/tools/site/mkdocs.yml" --site-dir="$out/$2"; }
entry() { printf '{"version": "%s", "title": "%s", "aliases": []}' "$1" "$1"; }

rm -rf "$out"
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
build . main
versions=$(entry main)
for revision; do
	git -c safe.directory="$PWD" archive --prefix="$revision/" "$revision" | tar -x -C "$tree"
	build "$tree/$revision" "$revision"
	versions+=", $(entry "$revision")"
done
echo "[$versions]" >"$out/versions.json"
echo "<!doctype html><title>vipgate</title><meta http-equiv=refresh content='0; url=${1:-main}/'>" >"$out/index.html"
