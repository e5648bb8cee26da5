#!/usr/bin/env bash
# Prints the lines of product code, by package and in total: Go files under cmd and
# pkg that are neither tests nor generated.
set -euo pipefail
cd "$(dirname "$0")/../.."
git ls-files -z 'cmd/*.go' 'pkg/*.go' ':!*_test.go' ':!pkg/api/' | xargs -0 wc -l | awk '
	$2 != "total" { sub("/[^/]*$", "", $2); lines[$2] += $1; sum += $1 }
	END { for (p in lines) printf "%6d  %s\n", lines[p], p; printf "%6d  total\n", sum }' | sort -n
