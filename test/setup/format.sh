#!/usr/bin/env bash
# format.sh list|write [FILE...] lists or formats Go files, those of the repository by default, whose
# format is not that of gofumpt, or whose imports are not the standard library's, other ones, vipgate's.
set -euo pipefail
cd "$(dirname "$0")/../.."
action=$1
shift
if [ $# = 0 ]; then
	mapfile -d '' files < <(git -c safe.directory="$PWD" ls-files -z --cached --others --exclude-standard '*.go')
	set -- "${files[@]}"
fi
files=()
for file in "$@"; do
	[ ! -e "$file" ] || grep -q '^// Code generated .* DO NOT EDIT\.$' "$file" || files+=("$file")
done
[ ${#files[@]} -gt 0 ] || exit 0
sections=(--section standard --section default --section 'prefix(github.com/vipgate/vipgate)')
flag=-l
[ "$action" = list ] || flag=-w
bin/tools/gci "$action" "${sections[@]}" "${files[@]}"
bin/tools/gofumpt $flag "${files[@]}"
