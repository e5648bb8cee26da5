# Everything a developer does with vipgate. `make help` lists it.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := build
MAKEFLAGS += --no-builtin-rules

# Relative paths only: the checkout may lie in a folder with spaces.
BIN := bin
TOOLS := $(BIN)/tools
GO := go

# Without the path of the clone, every clone has the same build cache. What the environment sets stays.
export GOFLAGS := $(strip $(filter-out -trimpath -buildvcs=false,$(GOFLAGS)) -trimpath -buildvcs=false)
# As images and releases have the programs. Only the race detector needs cgo, and sets it.
export CGO_ENABLED := 0
# The race detector sleeps for 1 s at the end of each test program otherwise.
export GORACE := $(strip $(filter-out atexit_sleep_ms=%,$(GORACE)) atexit_sleep_ms=0)

.PHONY: help
help: ## List the targets
	@awk -F ':[^#]*## ' '/^[a-z-]+:.*## / { printf "%-16s %s\n", $$1, $$2 }' Makefile

.PHONY: build
build: check-go ## Build lb, frontend, kube, target, meridio-frontend, vipgate and vipgate-probe into bin/
	@mkdir -p $(BIN)
	$(GO) build -ldflags '-X $(CLI).buildVersion=$(VERSION)' -o $(BIN)/ ./cmd/lb ./cmd/frontend ./cmd/kube ./cmd/target ./cmd/meridio-frontend ./cmd/vipgate ./cmd/vipgate-probe

.PHONY: demo
demo: check-root check-go ## Show vipgate at work in network namespaces (ACT=1 to 3 for one act, HOLD=1 leaves it running)
	@test/setup/packages.sh demo
	@$(MAKE) --no-print-directory build $(TOOLS)/grpcurl
	@$(GO) build -o $(BIN)/ ./test/demo
	@$(BIN)/demo --binaries=$(BIN) $(if $(ACT),--act=$(ACT)) $(if $(filter 1,$(HOLD)),--hold)

.PHONY: check
check: check-go $(TOOLS)/gofumpt ## Before a commit: unit tests of changed packages and their importers, style, format, generated files
	@test/setup/check.sh

.PHONY: test
test: check-root check-go ## Test: unit, race, end to end each row of the failure table with real BIRD (PACKAGES=./pkg/gate for some)
	@test/setup/test.sh $(or $(PACKAGES),unit core)

.PHONY: test-rest
test-rest: check-root check-go ## Run the other end-to-end tests, and those of the demo and of the documents
	@test/setup/test.sh rest

.PHONY: test-changed
test-changed: check-root check-go ## Run tests of make proof whose files changed since BASE: installation, site, replay, fuzzing, other BIRDs
	@test/setup/changed.sh

.PHONY: test-kube
test-kube: check-root check-go $(TOOLS)/kube-apiserver $(TOOLS)/helm ## Run the tests that need a Kubernetes API server, and start one for them
	@test/setup/test-kube.sh

.PHONY: test-node
test-node: check-root check-go $(TOOLS)/kubelet images ## Run the quickstart on a real kubelet and containerd: rollouts, a drain, force deletes (builds for 20 minutes once)
	@test/setup/test-node.sh

# The packages with functions that run at an edit or a verdict.
GROWTH = $(patsubst %,./%,$(dir $(wildcard pkg/*/growth_test.go pkg/*/*/growth_test.go)))

.PHONY: bench
bench: $(if $(SCALE),check-go,bench-tool) ## Measure everything that docs/performance.md shows (takes most of an hour; ROWS=1,2 for some; SCALE=1: only the growth up to 50 000 VIPs)
	@$(if $(SCALE),VIPGATE_TEST_SCALE=1 $(GO) test -vet=off -count=1 -p 1 -timeout 60m -v -run '^TestGrowth' $(GROWTH),$(BIN)/bench --binaries=$(BIN) --json=$(BIN)/bench.json --csv=$(BIN)/bench.csv --plots=$(BIN)/plots $(if $(ROWS),--rows=$(ROWS)))

.PHONY: bench-quick
bench-quick: bench-tool ## The same with few repeats and few VIPs, in under a minute: shows that it works, checks no number
	@$(BIN)/bench --binaries=$(BIN) --quick $(if $(ROWS),--rows=$(ROWS))

.PHONY: bench-tool
bench-tool: check-root check-go
	@test/setup/packages.sh demo chaos
	@$(MAKE) --no-print-directory build
	@$(GO) build -o $(BIN)/ ./test/bench ./test/meridiotest/meridio-lb

FAULTS := 20
SEED := 75

.PHONY: chaos
chaos: check-root check-go ## Inject FAULTS=20 random faults from SEED=75 and check what the gateways hold (SPEAKER=frr: behind an external FRR)
	@test/setup/packages.sh demo chaos
	@$(MAKE) --no-print-directory build
	@$(GO) build -o $(BIN)/ ./test/chaos
	@$(BIN)/chaos --binaries=$(BIN) --faults=$(FAULTS) --seed=$(SEED) --json=$(BIN)/chaos-$(SEED).json $(if $(SPEAKER),--speaker=$(SPEAKER))

.PHONY: replay
replay: check-root check-go ## Replay 19 public incidents and write their table into docs/proof.md (INCIDENT=I7: only shows one)
	@test/setup/packages.sh demo
	@$(MAKE) --no-print-directory build
	@$(GO) build -o $(BIN)/ ./test/replay
	@$(BIN)/replay --binaries=$(BIN) --json=$(BIN)/replay.json $(if $(INCIDENT),--incident=$(INCIDENT),--document=docs/proof.md)

FUZZTIME := 10s

.PHONY: fuzz
fuzz: check-go ## Run every fuzz target for FUZZTIME=10s
	@test/setup/fuzz.sh $(FUZZTIME)

.PHONY: proof
proof: check-root check-go ## Everything that CI leaves out, and the long forms: fuzzing, models, 500 faults on three seeds (takes hours)
	@test/setup/packages.sh demo test
	@$(MAKE) --no-print-directory build
	@$(GO) build -o $(BIN)/ ./test/chaos
	@test/setup/proof.sh

.PHONY: lint
lint: check-go tools ## Check format, code, imports, language, contracts and generated files
	@echo "format"; stale=$$(test/setup/format.sh list); [ -z "$$stale" ] || { echo "run make format: $$stale"; exit 1; }
	@echo "go vet"; $(GO) vet ./...
	@echo "staticcheck"; $(TOOLS)/staticcheck ./...
	@echo "imports, style"; $(GO) test -vet=off ./test/style/...
	@echo "release"; cd tools/release && $(GO) vet . && $(GO) test -vet=off .
	@echo "manifests"; cd tools/manifests && $(GO) vet . && $(GO) test -vet=off -skip TestAPIServer .
	@echo "go mod tidy"; $(GO) mod tidy -diff
	@echo "buf lint"; $(TOOLS)/buf lint
	@echo "buf breaking"; test/setup/breaking.sh $(TOOLS)/buf
	@$(MAKE) --no-print-directory generated

.PHONY: generated
generated: tools
	@echo "generated code"; test/setup/generated.sh $(TOOLS)

.PHONY: format
format: tools ## Format the code
	test/setup/format.sh write
	$(TOOLS)/buf format -w

.PHONY: generate
generate: tools ## Generate pkg/api from proto/, the flag tables and configurations of docs/, the schema of the trench file and that of the Trench
	PATH="$$PWD/$(TOOLS):$$PATH" $(TOOLS)/buf generate
	$(GO) test -p 1 ./cmd/lb ./cmd/frontend ./cmd/kube ./cmd/target ./cmd/meridio-frontend ./cmd/vipgate ./cmd/vipgate-probe -run TestConfigurationDocument -update
	$(GO) test ./pkg/trench/file -run TestSchemaIsCurrent -update
	$(GO) test ./pkg/kube/v1alpha1 -run TestCRD -update
	$(GO) test ./test/lab -run "Test(Gateways|Speakers)Document" -update
	$(GO) test ./test/docs -run "Test(Metrics|Limits)AreListed" -update

# A clone without tags has the commit as its version. The length is fixed: git's own depends on the clone.
# The clone may belong to another user. Without git the programs have no version.
CLI := github.com/vipgate/vipgate/cmd/internal/cli
VERSION = $(shell git -c safe.directory='$(CURDIR)' describe --tags --match='v[0-9]*' --always --dirty --abbrev=12 2>/dev/null)

# Of images: docker archives to build on, such as what "crane pull gcr.io/distroless/static-debian12 FILE" writes.
BASE_LB :=
BASE_FRONTEND :=
BASE_KUBE :=
BASE_TARGET :=
BASE_MERIDIO_FRONTEND :=
BASE_VIPGATE_PROBE :=

.PHONY: images
images: check-go ## Build images of lb, frontend, kube, target, vipgate-probe and meridio-frontend into bin/images/, for docker load or kind load image-archive
	@$(if $(and $(BASE_FRONTEND),$(BASE_MERIDIO_FRONTEND)),,tools/release/base.sh $$($(GO) env GOARCH) $(BIN)/release-base/$$($(GO) env GOARCH))
	@out="$$PWD/$(TOOLS)"; cd tools/release && $(GO) build -o "$$out/" .
	@$(TOOLS)/release --images --version=$(VERSION) --base=$(BIN)/release-base --out=$(BIN)/images \
		--base-lb="$(BASE_LB)" --base-frontend="$(BASE_FRONTEND)" --base-kube="$(BASE_KUBE)" \
		--base-target="$(BASE_TARGET)" --base-meridio-frontend="$(BASE_MERIDIO_FRONTEND)" --base-vipgate-probe="$(BASE_VIPGATE_PROBE)"
	@ls -l $(BIN)/images

.PHONY: packages
packages: check-go ## Build a Debian and an RPM package for this machine into bin/packages/ (docs/install.md)
	@out="$$PWD/$(TOOLS)"; cd tools/release && $(GO) build -o "$$out/" .
	@rm -rf $(BIN)/packages
	@$(TOOLS)/release --packages --version=$(VERSION) --out=$(BIN)/packages
	@ls -l $(BIN)/packages/*.deb $(BIN)/packages/*.rpm

.PHONY: release
release: check-go ## Build binaries, packages, images, charts, SBOM and provenance into bin/release/ for amd64 and arm64 (VERSION=v0.1.0)
	@out="$$PWD/$(TOOLS)"; cd tools/release && $(GO) build -o "$$out/" .
	@$(TOOLS)/release --check --version=$(VERSION)
	@rm -rf $(BIN)/release
	@for arch in amd64 arm64; do tools/release/base.sh $$arch $(BIN)/release-base/$$arch; done
	@$(TOOLS)/release --version=$(VERSION) --base=$(BIN)/release-base --out=$(BIN)/release
	@cd $(BIN)/release && sha256sum --check --quiet SHA256SUMS && ls -l

.PHONY: site
site: ## Build the documentation site into bin/site/, a folder for each version
	@test/setup/packages.sh site
	@tools/site/build.sh $(BIN)/site $$(git -c safe.directory='$(CURDIR)' tag --list 'v*' --sort=-version:refname)

.PHONY: tools
tools: $(TOOLS)/.built $(TOOLS)/buf $(TOOLS)/gofumpt ## Build the pinned tools

$(TOOLS)/.built: tools/go.mod tools/go.sum
	@mkdir -p $(TOOLS)
	@echo "building pinned tools (some minutes when cold)"
	@out="$$PWD/$(TOOLS)"; cd tools && $(GO) build -o "$$out/" tool
	@touch $@

$(TOOLS)/grpcurl: tools/go.mod tools/go.sum
	@mkdir -p $(TOOLS)
	@echo "building grpcurl (a minute when cold)"
	@out="$$PWD/$(TOOLS)"; cd tools && $(GO) build -o "$$out/" github.com/fullstorydev/grpcurl/cmd/grpcurl

$(TOOLS)/buf: tools/buf/go.mod tools/buf/go.sum
	@mkdir -p $(TOOLS)
	@echo "building buf (some minutes when cold)"
	@out="$$PWD/$(TOOLS)"; cd tools/buf && $(GO) build -o "$$out/" tool
	@touch $@

# staticcheck and gci, too.
$(TOOLS)/gofumpt: tools/lint/go.mod tools/lint/go.sum
	@mkdir -p $(TOOLS)
	@echo "building staticcheck, gofumpt and gci"
	@out="$$PWD/$(TOOLS)"; cd tools/lint && $(GO) build -o "$$out/" tool
	@touch $@

# The API server of test/kubernetes with its etcd, and kubectl, which consists of the same packages.
# Without cgo they share the packages of helm and of the tests.
$(TOOLS)/kube-apiserver: tools/kubernetes/go.mod tools/kubernetes/go.sum test/setup/kubernetes.sh
	@mkdir -p $(TOOLS)
	@echo "kube-apiserver, etcd and kubectl (several minutes when cold)"
	@test/setup/kubernetes.sh $(TOOLS)

$(TOOLS)/helm: tools/manifests/go.mod tools/manifests/go.sum
	@mkdir -p $(TOOLS)
	@echo "building helm (some minutes when cold)"
	@out="$$PWD/$(TOOLS)"; cd tools/manifests && $(GO) build -ldflags '-s -w' -o "$$out/" helm.sh/helm/v4/cmd/helm
	@touch $@

# It renders FRR's configuration in test/kube-e2e, when an input changed.
$(TOOLS)/frr-k8s-controller: tools/frr-k8s/go.mod tools/frr-k8s/go.sum
	@mkdir -p $(TOOLS)
	@echo "building frr-k8s (some minutes when cold)"
	@out="$$PWD/$(TOOLS)"; cd tools/frr-k8s && $(GO) build -ldflags '-s -w' -o "$$out/" tool

# The node of test/node.
# A kubelet needs cgo.
$(TOOLS)/kubelet: export CGO_ENABLED := 1
$(TOOLS)/kubelet: tools/kubernetes/go.mod tools/kubernetes/go.sum
	@mkdir -p $(TOOLS)
	@echo "kubelet, kube-controller-manager and kube-scheduler (20 minutes when cold)"
	@test/setup/kubernetes.sh $(TOOLS) kube-controller-manager kube-scheduler kubelet

.PHONY: lines
lines: ## Count the lines of product code by package
	@test/setup/lines.sh

.PHONY: check-go
check-go:
	@command -v $(GO) >/dev/null || { echo "vipgate needs Go 1.26, or a Go that can fetch it (1.21 or newer): https://go.dev/dl"; exit 1; }

.PHONY: check-root
check-root:
	@[ "$$(id -u)" = 0 ] || { echo "network namespaces need root: run as root, or with sudo"; exit 1; }

.PHONY: clean
clean: ## Remove what was built
	rm -rf $(BIN)
