#!/bin/sh
# Generates the stubs from the .proto files, and docs/api.md. The mapping -Icoatcheck/proto=proto gives the folder its import name.
set -eu
cd "$(dirname "$0")/../.."
out=${1:-$(mktemp -d)}
stubs=coatcheck/proto/stubs
"${PYTHON:-.venv/bin/python}" -m grpc_tools.protoc -Icoatcheck/proto=proto \
  --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" $stubs/coatcheck.proto $stubs/worker.proto
[ -n "${1:-}" ] || { cp "$out"/$stubs/*_pb2* proto/stubs/ && rm -r "$out" && "${PYTHON:-.venv/bin/python}" docs/make_api.py; }
