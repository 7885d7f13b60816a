#!/bin/bash
# Runs each fuzz target of the tree for the given time, one after the other.
set -euo pipefail
cd "$(dirname "$0")/.."
time=${1:-30s}
found=0
while IFS=: read -r file line; do
  target=$(sed -nE 's/^func (Fuzz[A-Za-z0-9_]+)\(.*/\1/p' <<<"$line")
  echo "== $target in $(dirname "$file"), $time"
  go test -run '^$' -fuzz "^$target\$" -fuzztime "$time" "./$(dirname "$file")"
  found=$((found + 1))
done < <(grep -rE --include='*_test.go' '^func Fuzz' internal cmd)
echo "$found fuzz targets ran"
[[ $found -gt 0 ]]
