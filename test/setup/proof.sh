#!/usr/bin/env bash
# The long forms of what CI runs for seconds, one after the other, with a summary
# at the end. It takes hours; a stage is left out when its duration is 0.
#   PROOF_FUZZ         time for each fuzz target (10m)
#   PROOF_CHECKS       runs of each model (100000)
#   PROOF_PAIR_CHECKS  runs of each model of the pair and of single packets, which takes 0.1 s a run (5000)
#   PROOF_FAULTS       faults of each chaos run (500)
#   PROOF_SEEDS        seeds of the chaos runs (1 2 3)
#   PROOF_FLOWS        flows that live through every change (1000)
#   PROOF_MOVES        scalings, after which all flows move (50)
#   PROOF_SIZE         VIPs, streams and targets of a pod (32768 500 1000)
#   PROOF_EDITS        how long its trench file is edited (10m)
#   PROOF_LEASE        its lease (1s)
#   PROOF_SMALL        the tests that CI leaves out unless their files change (1)
#   PROOF_HARDSHIP     the whole suite on a machine that stalls, and on half of a processor (1)
#   PROOF_LOGS         where the logs go (.cache/proof)
set -euo pipefail

fuzz=${PROOF_FUZZ:-10m}
checks=${PROOF_CHECKS:-100000}
pair_checks=${PROOF_PAIR_CHECKS:-5000}
faults=${PROOF_FAULTS:-500}
seeds=${PROOF_SEEDS:-1 2 3}
flows=${PROOF_FLOWS:-1000}
moves=${PROOF_MOVES:-50}
size=${PROOF_SIZE:-32768 500 1000}
edits=${PROOF_EDITS:-10m}
logs=${PROOF_LOGS:-.cache/proof}

mkdir -p "$logs"
summary=""
status=0

# stage NAME COMMAND… runs one stage; a failure does not end the others.
stage() {
	local name=$1 log result=passed begin=$SECONDS
	shift
	log="$logs/${name//[^A-Za-z0-9.]/-}.log"
	echo "== $name: $(date -u +%H:%M:%S) $log"
	if ! "$@" </dev/null 2>&1 | tee "$log"; then
		result=FAILED
		status=1
	fi
	summary+=$(printf '%-60s %-7s %6ds' "$name" "$result" $((SECONDS - begin)))$'\n'
}

# models lists the tests that check a model: package, name, and the number of
# runs that suits it.
models() {
	grep -rl --include='*_test.go' 'rapid\.Check(' cmd pkg test | sort | while read -r file; do
		awk -v package="$(dirname "$file")" '
			/^func Test/ { name = $2; sub(/\(.*/, "", name) }
			/rapid\.Check\(/ && name != "" { print package, name; name = "" }' "$file"
	done
}

[ "${PROOF_SMALL:-1}" = 0 ] || stage "tests that CI leaves out" test/setup/changed.sh all

[ "$fuzz" = 0 ] || stage "fuzz, $fuzz each" test/setup/fuzz.sh "$fuzz"

while read -r package name; do
	n=$checks
	case $name in
	TestTableAndWatcherConverge | TestGateNeverOutlivesLease | TestRandomPackets | TestRandomReturns) n=$pair_checks ;;
	esac
	[ "$n" = 0 ] || stage "$name, $n times" go test "./$package" -run "^$name\$" -count 1 -timeout 0 -rapid.checks="$n"
done < <(models)

[ "$flows" = 0 ] || stage "$flows flows through every change" \
	env VIPGATE_TEST_FLOWS="$flows" go test ./test/e2e -run '^TestFlowsSurviveSequence$' -count 1 -v
[ "$moves" = 0 ] || stage "$moves scalings before flows move" \
	go test ./test/e2e -run '^TestFlowsMoveAfterScaling$' -count "$moves" -timeout 0

[ "$edits" = 0 ] || stage "a pod of $size, edited for $edits" \
	env VIPGATE_TEST_SIZE="$size $edits ${PROOF_LEASE:-1s}" go test ./test/e2e -run '^TestPodAtSize$' -count 1 -timeout 0 -v

if [ "${PROOF_HARDSHIP:-1}" != 0 ]; then
	for mode in stalls half; do
		stage "the whole suite, $mode" \
			env VIPGATE_TEST_PATIENCE=6 test/setup/hardship.sh $mode test/setup/test.sh unit core rest
	done
fi

if [ "$faults" != 0 ]; then
	go build -o bin/ ./cmd/lb ./cmd/frontend ./test/chaos
	results=()
	for seed in $seeds; do
		stage "chaos, $faults faults, seed $seed" bin/chaos --binaries=bin --faults="$faults" --seed="$seed" \
			--json="$logs/chaos-$seed.json"
		results+=(--from="$logs/chaos-$seed.json")
	done
	stage "the table of docs/proof.md" bin/chaos --document=docs/proof.md "${results[@]}"
fi

printf '\n%s' "$summary"
exit $status
