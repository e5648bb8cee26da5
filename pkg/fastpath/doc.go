// Package fastpath forwards packets of VIPs by a tcx program in front of nftables.
//
// It guarantees that a packet reaches the target that nftables would select, from the same hash and
// Maglev table, or continues to nftables. The program remembers no flows, and its links and maps
// close with the process: nftables then forwards everything. See docs/adr/0046-fast-path.md.
package fastpath

// Both architectures of the releases are little endian. The folders have <asm/types.h> on Debian.
//
//go:generate -command bpf go run github.com/cilium/ebpf/cmd/bpf2go -target bpfel -no-global-types
//go:generate bpf bytecode fastpath.c -- -Wall -Werror -I/usr/include/x86_64-linux-gnu -I/usr/include/aarch64-linux-gnu
//go:generate sh -c "sha256sum fastpath.c >fastpath.c.sha256"
