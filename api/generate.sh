#!/bin/sh
# Writes api/gen from api/proto. Run by "go generate ./api".
set -eu
cd "$(dirname "$0")"
command -v protoc >/dev/null || { echo "protoc is missing: apt-get install protobuf-compiler" >&2; exit 1; }
rm -rf gen
mkdir -p gen/rest
protoc --proto_path=proto \
	--plugin=protoc-gen-go="$(go tool -n protoc-gen-go)" --go_out=gen --go_opt=paths=source_relative \
	--plugin=protoc-gen-connect-go="$(go tool -n protoc-gen-connect-go)" --connect-go_out=gen --connect-go_opt=paths=source_relative \
	process/process.proto filesystem/filesystem.proto agentzip/guest/v1/guest.proto
go tool -modfile=../tools/go.mod oapi-codegen -config openapi/config.yaml -o gen/rest/rest.gen.go openapi/agentzip.yaml
