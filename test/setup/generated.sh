#!/usr/bin/env bash
# Fails when pkg/api is not what buf makes of proto/, or when pkg/fastpath is not what clang makes
# of fastpath.c.
set -euo pipefail
tools=$PWD/$1
dir=$(mktemp -d)
copy=$(mktemp -d -p pkg .fastpath.XXXXXX) # in the module, whose version of bpf2go counts
trap 'rm -rf "$dir" "$copy"' EXIT
PATH="$tools:$PATH" "$tools/buf" generate -o "$dir"
diff -r "$dir/pkg/api" pkg/api || {
	echo "pkg/api is stale: run make generate" >&2
	exit 1
}

[ "$(id -u)" != 0 ] || test/setup/packages.sh clang llvm libbpf-dev
# Another version of clang writes another object.
if ! clang --version 2>/dev/null | grep -q 'version 14\.'; then
	echo "pkg/fastpath is not compared: that needs clang 14, as in Debian 12" >&2
	exit 0
fi
cp pkg/fastpath/doc.go pkg/fastpath/fastpath.c "$copy"
go generate -C "$copy" .
for file in bytecode_bpfel.go bytecode_bpfel.o; do
	cmp "$copy/$file" "pkg/fastpath/$file" || {
		echo "pkg/fastpath is stale: run go generate ./pkg/fastpath" >&2
		exit 1
	}
done
