# Sourced by scripts that run stages. At the end of the outermost script a table shows the time of each
# stage and which failed. A failed stage does not end the others; the script ends with $status.
status=0
stages=${VIPGATE_TEST_STAGES:-}
indent="  "
if [ -z "$stages" ]; then
	indent=""
	stages=$(mktemp)
	export VIPGATE_TEST_STAGES=$stages
	trap '[ ! -s "$stages" ] || { echo; cat "$stages"; printf "%-60s %-10s %6d s\n" total "" $SECONDS; }; rm -f "$stages"' EXIT
fi

# stage NAME COMMAND...
stage() {
	local name=$indent$1 result=passed begin=$SECONDS
	shift
	echo "== $name: $(date -u +%H:%M:%S)"
	printf '%-60s %-10s\n' "$name" unfinished >>"$stages"
	"$@" </dev/null || {
		result=FAILED
		status=1
	}
	# Stages of a script inside this one are above its line.
	local line
	line=$(printf '%-60s %-10s' "$name" unfinished)
	grep -vxF -- "$line" "$stages" >"$stages.new" || true
	printf '%-60s %-10s %6d s\n' "$name" $result $((SECONDS - begin)) >>"$stages.new"
	mv "$stages.new" "$stages"
}
