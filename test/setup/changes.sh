# Sourced by scripts whose work depends on the changes of a branch. changed_files lists the files that
# differ from the base commit: BASE, or where the branch left main, or on main HEAD's parent.
repository() { git -c safe.directory="$PWD" "$@"; }

base() {
	if [ -n "${BASE:-}" ]; then
		echo "$BASE"
		return
	fi
	local ref commit
	for ref in origin/main main; do
		commit=$(repository merge-base HEAD $ref 2>/dev/null) || continue
		[ "$commit" != "$(repository rev-parse HEAD)" ] || continue
		echo "$commit"
		return
	done
	# A clone without history has no base: only what is not committed is a change.
	repository rev-parse --verify --quiet HEAD^ || echo HEAD
}

# changed_files fails if the base commit is not in the clone: an empty list would mean no change.
changed_files() {
	repository diff --name-only --relative "$(base)" || return
	repository ls-files --others --exclude-standard
}
