# AgentZip. `make` alone says what there is to do. `make demo` and `make test`
# start from nothing: they install, build and prepare what they need, and skip
# what is already done.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

# Tests and the demo take the guest agent and the shim from here.
export AGENTZIP_LIBDIR := $(CURDIR)/bin

FUZZTIME ?= 30s
BENCH ?= .
ARGS ?=

.PHONY: bench-restore bench-codec test-e2b help demo setup build test race fuzz bench figures lint fmt e2e clean

help: ## say what there is to do
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: setup ## set everything up and run the main job; ARGS="--gap-scale 0.5" passes flags
	@bin/agentzip demo $(ARGS)

setup: ## packages, binaries and the template (root)
	@scripts/setup.sh all

build: ## compile bin/agentzip, bin/agentzip-guest, bin/agentzip-shim.so
	@scripts/setup.sh build

test: setup ## set everything up and run every test
	@scripts/test.sh all

race: build ## tests of the packages without VMs, race detector and invariants on
	@scripts/test.sh race

fuzz: build ## each fuzz target for FUZZTIME (30s)
	@scripts/fuzz.sh $(FUZZTIME)

bench: build ## Go benchmarks; BENCH=regexp picks some
	@go test -run '^$$' -bench '$(BENCH)' -benchmem ./internal/...

bench-codec: setup ## capture sixteen siblings (once) and measure encoders on their pages; ARGS="--rows agentzip"
	@scripts/bench-codec.sh $(ARGS)

bench-restore: setup ## replay sixteen siblings and measure what restores cost (45 minutes; ARGS="--quick": one)
	@scripts/bench-restore.sh $(ARGS)

e2e: setup ## only the tests that start VMs
	@scripts/test.sh vm

test-e2b: setup ## the published E2B clients against agentzip serve; ARGS="--only files"
	@scripts/test-e2b.sh $(ARGS)

figures: setup ## run the demo and write its table into README.md and docs/results/
	@scripts/figures.sh

lint: build ## golangci-lint with the house rules
	@scripts/lint.sh

fmt: ## gofumpt over the tree
	@go tool -modfile=tools/go.mod gofumpt -l -w cmd internal

clean: ## remove bin/ and build/ (templates stay: agentzip template rm)
	@rm -rf bin build
