#!/usr/bin/env bash
# Build the wheel of this checkout into a folder: build_wheel.sh PYTHON FOLDER
#
# It is built from a copy: setuptools would put what an earlier build left in build/lib into the wheel as well.
set -euo pipefail
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
mkdir -p "$2"
target=$(cd "$2" && pwd)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
tar -C "$root" --exclude='./.[a-z]*' --exclude=./build --exclude=./dist --exclude='./*.egg-info' \
    --exclude=./tests/data -cf - . | tar -C "$scratch" -xf -
if ! "$python" -m build --wheel --no-isolation --outdir "$target" "$scratch" >"$scratch/log" 2>&1; then
    cat "$scratch/log" >&2
    exit 1
fi
