#!/usr/bin/env bash
# Fuzzes every target, one after the other, for the given time each (10s).
# FUZZ_PARALLEL workers (2); FUZZ_TARGETS is a regular expression of names (all), FUZZ_PACKAGES a list.
# What is found stays in testdata/fuzz of its package, as a regression test once
# it is committed. What was only interesting stays in Go's own build cache.
set -euo pipefail

duration=${1:-10s}
parallel=${FUZZ_PARALLEL:-2}
wanted=${FUZZ_TARGETS:-.}

# out_of_time reports whether all that failed is Go's own end of the fuzzing: a worker
# that is late then is reported as "context deadline exceeded", with no input that
# would fail (seen once in some hundred runs of Go 1.26).
out_of_time() {
	grep -q '^    context deadline exceeded$' "$log" && ! grep -qE 'Failing input written to|failure while testing seed corpus entry|panic:|_test\.go:[0-9]+' "$log"
}

log=$(mktemp)
trap 'rm -f "$log"' EXIT
targets=0
# Asking only the packages that have some saves building all the others.
packages=${FUZZ_PACKAGES:-$(grep -rl --include='*_test.go' '^func Fuzz' cmd pkg test | xargs -r -d '\n' -n 1 dirname | sort -u)}
for package in $packages; do
	if ! list=$(go test -vet=off -list '^Fuzz' "./$package" 2>&1); then
		printf '%s\n' "$list" >&2
		exit 1
	fi
	for target in $(grep '^Fuzz' <<<"$list" | grep -E -- "$wanted" || true); do
		targets=$((targets + 1))
		if go test -vet=off "./$package" -run '^$' -fuzz "^$target\$" -fuzztime "$duration" -fuzzminimizetime 1s -parallel "$parallel" >"$log" 2>&1 || out_of_time; then
			awk -v name="$package $target" -v duration="$duration" '
				match($0, /execs: [0-9]+/) { execs = substr($0, RSTART + 7, RLENGTH - 7) }
				match($0, /new interesting: [0-9]+/) { fresh = substr($0, RSTART + 17, RLENGTH - 17) }
				END { printf "%-40s %6s %10d executions %5d new interesting inputs\n", name, duration, execs, fresh }' "$log"
			continue
		fi
		cat "$log" >&2
		echo "FOUND by $package $target" >&2
		input=$(sed -n 's|.*Failing input written to testdata/fuzz/||p' "$log" | tail -n 1)
		input=${input:-$(sed -n "s|.*failure while testing seed corpus entry: ||p" "$log" | tail -n 1)}
		echo "reproduce with: go test ./$package -run '^${input:-$target}\$'" >&2
		exit 1
	done
done
[ "$targets" -gt 0 ] || {
	echo "no fuzz target matches $wanted" >&2
	exit 1
}
