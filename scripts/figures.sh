#!/bin/bash
# Runs the main job and puts what it printed into README.md and docs/results/, so
# that no published figure was typed by hand. Called by `make figures`.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p docs/results build
bin/agentzip demo --plain --json build/demo.json >build/demo.txt
tail -n 1 build/demo.txt | grep -q 'integrity=ok$' || { echo "figures: the run is void: $(tail -n 1 build/demo.txt)" >&2; exit 1; }
cp build/demo.txt docs/results/demo.txt
gzip -9nc build/demo.json >docs/results/demo.json.gz
awk '
  /<!-- FIGURES/ { print; print ""; print "```text"; while ((getline line < "build/demo.txt") > 0) print line; print "```"; skip = 1; next }
  skip && /<!-- \/FIGURES -->/ { skip = 0; print "" }
  !skip { print }' README.md >build/README.md
cp build/README.md README.md
echo "figures: README.md and docs/results/ hold the run that ended with"
tail -n 1 build/demo.txt
