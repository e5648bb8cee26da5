# Sourced by scripts that run stages. At the end of the outermost script a table shows the time and the
# processor time of each stage and which failed. A failed stage does not end the others; the script ends
# with $status.
status=0
stages=${VIPGATE_TEST_STAGES:-}
indent="  "
if [ -z "$stages" ]; then
	indent=""
	stages=$(mktemp)
	export VIPGATE_TEST_STAGES=$stages
	trap '[ ! -s "$stages" ] || { printf "\n%-71s %8s %8s\n" "" time "of CPUs"; cat "$stages"; row total "" $SECONDS "$(processor)"; }; rm -f "$stages"' EXIT
fi

# processor prints the processor time of all ended children in seconds (proc_pid_stat(5): cutime, cstime).
processor() {
	local fields
	read -ra fields </proc/$$/stat
	echo $(((fields[15] + fields[16]) / $(getconf CLK_TCK)))
}

row() { printf '%-60s %-10s %6d s %6d s\n' "$@"; }

# stage NAME COMMAND...
stage() {
	local name=$indent$1 result=passed begin=$SECONDS used
	used=$(processor)
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
	row "$name" $result $((SECONDS - begin)) $(($(processor) - used)) >>"$stages.new"
	mv "$stages.new" "$stages"
}
