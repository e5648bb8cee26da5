#!/usr/bin/env bash
# Boots systemd in namespaces of its own, on the root LOWER below an overlay in the empty directory
# DIR, with the folders SOURCE at TARGET. It ends with this process.
# boot.sh LOWER DIR [SOURCE TARGET]...
set -euo pipefail
lower=$1 dir=$2
shift 2
# The machine's cgroup, in the hierarchy of version 2.
cgroup=$(awk '$3 == "cgroup2" { print $2; exit }' /proc/mounts)
mkdir -p "$cgroup/$(basename "$dir")"
echo $$ >"$cgroup/$(basename "$dir")/cgroup.procs"
export lower dir
exec unshare --mount --pid --uts --ipc --cgroup --net --fork --kill-child bash -euo pipefail -c '
mount --make-rprivate /
mount -t tmpfs -o mode=0755 tmpfs "$dir"
root=$dir/root
mkdir "$root" "$dir/upper" "$dir/work" "$dir/proc"
mount -t overlay -o "lowerdir=$lower,upperdir=$dir/upper,workdir=$dir/work" overlay "$root"
mount -t proc proc "$root/proc"
# Only the settings of its network namespace belong to the machine.
mount -t proc proc "$dir/proc"
mount --bind -o ro "$root/proc/sys" "$root/proc/sys"
mount -o remount,bind,ro "$root/proc/sys"
mount --bind "$dir/proc/sys/net" "$root/proc/sys/net"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount -t tmpfs -o mode=0755 tmpfs "$root/run"
mount -t tmpfs tmpfs "$root/tmp"
mount -t tmpfs -o mode=0755 tmpfs "$root/dev"
for device in null zero full random urandom tty; do
	touch "$root/dev/$device"
	mount --bind "/dev/$device" "$root/dev/$device"
done
mkdir "$root/dev/shm" "$root/dev/pts"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
while [ $# -gt 0 ]; do
	mkdir -p "$root$2"
	mount --bind "$1" "$root$2"
	shift 2
done
cd "$root"
mkdir -p .old
pivot_root . .old
umount -l .old
hostname machine
exec env -i container=vipgate-test PATH=/usr/sbin:/usr/bin /lib/systemd/systemd --log-target=journal
' boot "$@"
