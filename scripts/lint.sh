#!/bin/bash
# golangci-lint with the house rules (.golangci.yml), in the version that
# tools/go.mod pins. Its first build takes some five minutes; after that it is kept.
set -euo pipefail
cd "$(dirname "$0")/.."
key=$(cat tools/go.mod tools/go.sum | sha256sum | cut -c1-16)
linter=build/tools/golangci-lint-$key
if [[ ! -x $linter ]]; then
  echo "lint: building golangci-lint (once, about five minutes)"
  mkdir -p build/tools
  (cd tools && go build -o "../$linter.new" github.com/golangci/golangci-lint/v2/cmd/golangci-lint) ||
    { echo "lint: golangci-lint does not build or cannot be downloaded: check the network and GOPROXY" >&2; exit 1; }
  mv "$linter.new" "$linter"
fi
exec "$linter" run "${@:-./...}"
