#!/bin/bash
# Runs the main job of sixteen siblings and measures what restores cost: table, SVG and raw
# figures into build/. Called by `make bench-restore`; takes some 45 minutes, ARGS="--quick" one.
# With KEEP=1 the result goes to README.md and docs/results/.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p build docs/results
bin/agentzip bench restore --plain --json build/restore.json.gz --plot build/restore.svg "$@" >build/restore.txt.new
mv build/restore.txt.new build/restore.txt
cat build/restore.txt
if [[ ${KEEP:-0} == 1 ]]; then
  cp build/restore.txt build/restore.svg build/restore.json.gz docs/results/
  awk '
    /<!-- RESTORE/ { print; print ""; print "```text"; while ((getline line < "build/restore.txt") > 0) print line; print "```"; skip = 1; next }
    skip && /<!-- \/RESTORE -->/ { skip = 0; print "" }
    !skip { print }' README.md >build/README.md
  cp build/README.md README.md
fi
