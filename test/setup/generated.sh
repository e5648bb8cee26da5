#!/usr/bin/env bash
# Fails when pkg/api differs from the output of buf for proto/, or the object of pkg/fastpath from
# the output of clang 14 for fastpath.c. Without clang 14, only a test of pkg/fastpath compares
# fastpath.c, by its checksum.
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

# Another version of clang writes another object.
BPF2GO_CC=$(command -v clang-14 || command -v clang || echo false)
export BPF2GO_CC
if ! "$BPF2GO_CC" --version | grep -q 'version 14\.' || ! command -v llvm-strip-14 llvm-strip >/dev/null ||
	[ ! -e /usr/include/bpf/bpf_helpers.h ]; then
	echo "the object of pkg/fastpath is not compared: it needs clang, llvm and libbpf-dev of Debian 12" >&2
	exit 0
fi
cp pkg/fastpath/doc.go pkg/fastpath/fastpath.c "$copy"
go generate -C "$copy" .
for file in bytecode_bpfel.go bytecode_bpfel.o fastpath.c.sha256; do
	cmp "$copy/$file" "pkg/fastpath/$file" || {
		echo "pkg/fastpath is stale: run go generate ./pkg/fastpath with clang 14" >&2
		exit 1
	}
done
