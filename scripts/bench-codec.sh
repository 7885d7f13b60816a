#!/bin/bash
# Captures the main job of sixteen siblings (once; build/capture) and measures the
# encoders on it. Called by `make bench-codec`. With KEEP=1 the result goes to docs/results/.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p build docs/results
[[ -d build/capture ]] || bin/agentzip capture build/capture
bin/agentzip bench codec build/capture --json build/codec.json --plot build/codec.svg --bench build/codec.bench "$@" | tee build/codec.txt
if [[ ${KEEP:-0} == 1 ]]; then
  cp build/codec.txt build/codec.svg docs/results/
  gzip -9nc build/codec.json >docs/results/codec.json.gz
  awk '
    /<!-- CODEC/ { print; print ""; print "```text"; while ((getline line < "build/codec.txt") > 0) print line; print "```"; skip = 1; next }
    skip && /<!-- \/CODEC -->/ { skip = 0; print "" }
    !skip { print }' README.md >build/README.md
  cp build/README.md README.md
fi
