#!/usr/bin/env bash
# Builds etcd, kube-apiserver, kubectl and further programs of Kubernetes, if named, into the given
# folder, unless those of tools/kubernetes/go.mod exist already: a checkout makes go.mod newer than a
# cached binary.
set -euo pipefail
out=$(cd "$1" && pwd)
shift
cd "$(dirname "$0")/../../tools/kubernetes"

# build NAME PACKAGE MODULE
build() {
	local want
	want=$(go list -m -f '{{ .Version }}' "$3")
	if [[ $(go version -m "$out/$1" 2>/dev/null) != *"	mod	$3	$want	"* ]]; then
		echo "building $1 $want"
		# Clients such as helm ask for the version.
		go build -ldflags "-s -w -X k8s.io/component-base/version.gitVersion=$want" -o "$out/$1" "$2"
	fi
	touch "$out/$1"
}
build etcd go.etcd.io/etcd/server/v3 go.etcd.io/etcd/server/v3
for program in kube-apiserver kubectl "$@"; do
	build "$program" "k8s.io/kubernetes/cmd/$program" k8s.io/kubernetes
done
