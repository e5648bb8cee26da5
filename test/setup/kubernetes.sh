#!/usr/bin/env bash
# Builds etcd, kube-apiserver and further programs of Kubernetes, if named, into the given folder,
# unless those of tools/kubernetes/go.mod exist already: a checkout makes go.mod newer than a cached
# binary.
set -euo pipefail
out=$(cd "$1" && pwd)
shift
cd "$(dirname "$0")/../../tools/kubernetes"

# build NAME PACKAGE MODULE
build() {
	local want have
	want=$(go list -m -f '{{ .Version }}' "$3")
	have=$(go version -m "$out/$1" 2>/dev/null | awk -v m="$3" '$1 != "path" && $2 == m { print $3 }') || true
	if [ "$have" != "$want" ]; then
		echo "building $1 $want"
		go build -ldflags '-s -w' -o "$out/$1" "$2"
	fi
	touch "$out/$1"
}
build etcd go.etcd.io/etcd/server/v3 go.etcd.io/etcd/server/v3
for program in kube-apiserver "$@"; do
	build "$program" "k8s.io/kubernetes/cmd/$program" k8s.io/kubernetes
done
