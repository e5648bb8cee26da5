#!/usr/bin/env bash
# Runs a command on a machine that stalls, or is slow: hardship.sh MODE COMMAND…
#   stalls  all processes of the command freeze for STALL=2 seconds, after a random time of INTERVAL=5
#           seconds on average, as a virtual machine does that its host stops (SEED=1)
#   half    they have half of a processor together
# It needs root and cgroup v1 (freezer, cpu) or v2. The status is that of the command.
set -euo pipefail

mode=$1
shift
stall=${STALL:-2} interval=${INTERVAL:-5}
RANDOM=${SEED:-1}
case $mode in
stalls) controller=freezer ;;
half) controller=cpu ;;
*)
	echo "hardship.sh: mode $mode is neither stalls nor half" >&2
	exit 2
	;;
esac

if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
	group=/sys/fs/cgroup/vipgate-$$
	[ $mode = stalls ] || echo +cpu >/sys/fs/cgroup/cgroup.subtree_control
else
	group=/sys/fs/cgroup/$controller/vipgate-$$
fi
mkdir "$group" || {
	echo "hardship.sh: failed to create control group $group" >&2
	exit 2
}

# frozen 1 freezes the processes, frozen 0 thaws them.
frozen() {
	if [ -e "$group/cgroup.freeze" ]; then
		echo "$1" >"$group/cgroup.freeze"
	elif [ "$1" = 1 ]; then
		echo FROZEN >"$group/freezer.state"
	else
		echo THAWED >"$group/freezer.state"
	fi
}
# remove ends what the command left running.
remove() {
	if [ $mode = stalls ]; then
		frozen 0
	fi
	for _ in $(seq 50); do
		xargs -r kill -KILL <"$group/cgroup.procs" 2>/dev/null || true
		rmdir "$group" 2>/dev/null && return
		sleep 0.1
	done
	echo "hardship.sh: control group $group is left over" >&2
}
trap remove EXIT

if [ $mode = half ]; then
	if [ -e "$group/cpu.max" ]; then
		echo "50000 100000" >"$group/cpu.max"
	else
		echo 100000 >"$group/cpu.cfs_period_us"
		echo 50000 >"$group/cpu.cfs_quota_us"
	fi
fi

(
	echo $BASHPID >"$group/cgroup.procs"
	exec "$@"
) &
command=$!
if [ $mode = stalls ]; then
	stalls=0
	while kill -0 $command 2>/dev/null; do
		# An exponential distribution: stalls may follow each other.
		pause=$(awk -v mean="$interval" -v r="$RANDOM" 'BEGIN { print -mean * log((r + 1) / 32769) }')
		sleep "$pause"
		kill -0 $command 2>/dev/null || break
		frozen 1
		sleep "$stall"
		frozen 0
		stalls=$((stalls + 1))
	done
	echo "hardship.sh: $stalls stalls of $stall s" >&2
fi
status=0
wait $command || status=$?
exit $status
