#!/usr/bin/env bash
# Runs test/node: a Kubernetes cluster of two nodes on this machine. Mounts, network and processes are
# in namespaces of their own and end with the test; the cgroups and the sysctls that a kubelet sets
# are restored here. KEEP=1 keeps the files of the run.
set -euo pipefail
cd "$(dirname "$0")/../.."

# What the nodes have in /sys/fs/cgroup.
group=vipgate-test-node
# What a kubelet sets for the whole machine.
sysctls="vm.overcommit_memory vm.panic_on_oom kernel.panic kernel.panic_on_oops kernel.keys.root_maxkeys kernel.keys.root_maxbytes"

# inside DIR: the part in the namespaces; bash is their init.
if [ "${1:-}" = inside ]; then
	dir=$2
	# Containers have mounts that follow those of the node.
	mount --make-rshared /
	# The folders of kubelet, containerd, runc and the CNI plugins.
	for folder in /var/lib /var/log /run; do
		mkdir -p "$dir/node$folder"
		mount --bind "$dir/node$folder" "$folder"
	done
	# On a busy machine pods, which request little, would starve.
	echo 0 >/sys/fs/cgroup/cpu/$group/cgroup.procs
	cd test/node
	HOME=$dir VIPGATE_TEST_NODE=$dir TMPDIR=$dir/tmp "$dir/node.test" -test.v -test.timeout 40m ${RUN:+-test.run "$RUN"}
	exit
fi

lacking=0
lacks() {
	echo "missing: $1"
	lacking=1
}
need() { command -v "$1" >/dev/null || lacks "$1 (Debian: apt-get install $2)"; }
need containerd containerd
need runc runc
need ip iproute2
need nft nftables
need iptables iptables
need unshare util-linux
for plugin in bridge host-local loopback portmap; do
	[ -x "/usr/lib/cni/$plugin" ] || lacks "/usr/lib/cni/$plugin (Debian: apt-get install containernetworking-plugins)"
done
for program in etcd kube-apiserver kube-controller-manager kube-scheduler kubelet kubectl; do
	[ -x "bin/tools/$program" ] || lacks "bin/tools/$program (make test-node builds it)"
done
for image in lb frontend kube target; do
	[ -f "bin/images/$image.tar" ] || lacks "bin/images/$image.tar (make images)"
done
grep -qw overlay /proc/filesystems || modprobe -q overlay || lacks "overlayfs in the kernel"
[ -d /sys/fs/cgroup/memory ] || lacks "cgroup v1 with the controllers in /sys/fs/cgroup: v2 was never tested"
[ ! -d /sys/fs/cgroup/memory/$group ] || lacks "a free name: /sys/fs/cgroup/*/$group exist, of another run or a killed one"
[ $lacking = 0 ] || exit 1

# A short path: those of unix sockets end at 108 bytes.
dir=$(mktemp -d /tmp/vipgate-node.XXXXXX)
mkdir "$dir/tmp"
# shellcheck disable=SC2086 # one word for each
before=$(sysctl $sysctls)

nodes=
# remove ends the namespaces, and with them processes and mounts.
remove() {
	[ -z "$nodes" ] || kill -KILL "$nodes" 2>/dev/null || true
	for _ in $(seq 50); do
		find /sys/fs/cgroup -mindepth 2 -depth -path "*/$group*" -type d -exec rmdir {} + 2>/dev/null && break
		sleep 0.2 # processes are ending
	done
	echo "$before" | sysctl -q -p - || true
	if [ "${KEEP:-}" = 1 ]; then
		echo "kept: $dir"
	else
		rm -rf "$dir"
	fi
}
trap remove EXIT

for controller in /sys/fs/cgroup/*/; do
	[ -e "$controller/cgroup.procs" ] || continue
	for node in node-a node-b; do
		mkdir -p "$controller$group/$node"
		for file in cpuset.cpus cpuset.mems; do
			[ -e "$controller$file" ] || continue
			cat "$controller$file" >"$controller$group/$file"
			cat "$controller$file" >"$controller$group/$node/$file"
		done
	done
done

# The image of a pod's sandbox: a program that waits.
arch=$(go env GOARCH)
tar -C "bin/release-base/$arch/root/bin" -cf "$dir/layer.tar" busybox
layer=$(sha256sum <"$dir/layer.tar" | cut -d' ' -f1)
cat >"$dir/config.json" <<-END
	{"architecture": "$arch", "os": "linux", "config": {"Entrypoint": ["/busybox", "sleep", "1d"]},
	 "rootfs": {"type": "layers", "diff_ids": ["sha256:$layer"]}}
END
printf '[{"Config":"config.json","RepoTags":["vipgate/pause:test"],"Layers":["layer.tar"]}]' >"$dir/manifest.json"
tar -C "$dir" -cf "$dir/pause.tar" manifest.json config.json layer.tar

echo 16384 >/sys/fs/cgroup/cpu/$group/cpu.shares

go test -c -o "$dir/node.test" ./test/node
unshare --mount --net --pid --fork --mount-proc --kill-child test/setup/test-node.sh inside "$dir" &
nodes=$!
status=0
wait "$nodes" || status=$?
nodes=
exit $status
