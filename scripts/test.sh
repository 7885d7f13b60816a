#!/bin/bash
# Runs the tests and closes with the line "N passed, N failed". Called by the
# Makefile, after the set-up.
#
#   scripts/test.sh all    vet, every package as shipped, race + invariants, VMs
#   scripts/test.sh race   packages without VMs, with race detector and invariants
#   scripts/test.sh vm     only the packages whose tests start VMs
set -uo pipefail
cd "$(dirname "$0")/.."

# Their tests start VMs, which under TCG is most of the time of a run: once, one
# package at a time, never from the test cache.
readonly VM='/internal/(vmm|template|sandbox|daemon|bench)$|/cmd/agentzip$'

# -e: a package that does not load is listed too, and then fails its test.
list() { go list -e ./... | grep "$@"; }

stage() { # name, packages, go test flags...
  local name=$1 packages=$2
  shift 2
  [[ -n $packages ]] || return 0
  echo "== $name"
  # shellcheck disable=SC2086  # a list of words on purpose
  if go test -json "$@" $packages 2>&1; then echo "stage $name passed"; else echo "stage $name failed"; fi
}

vet() {
  echo "== vet"
  if go vet ./... 2>&1 && go vet -tags invariants ./... 2>&1 && CGO_ENABLED=0 go vet ./... 2>&1; then
    echo "stage vet passed"
  else
    echo "stage vet failed"
  fi
}

unit() { stage unit "$(list -Ev "$VM")" -timeout 5m; }
nocgo() { CGO_ENABLED=0 stage nocgo ./internal/codec/... -timeout 5m; }
race() { stage race "$(list -Ev "$VM")" -race -tags invariants -timeout 10m; }
vm() { stage vm "$(list -E "$VM")" -tags invariants -count 1 -p 1 -timeout 15m; }

case ${1:-all} in
  all) run() { vet; unit; nocgo; race; vm; } ;;
  race) run() { race; } ;;
  vm) run() { vm; } ;;
  *) echo "usage: scripts/test.sh all|race|vm" >&2; exit 2 ;;
esac
mkdir -p build/out
go build -o build/out/testsum ./scripts/testsum || exit 1
run | build/out/testsum
