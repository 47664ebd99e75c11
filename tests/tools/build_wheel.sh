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
"$python" - "$root" "$scratch/tree" <<'END'
import os, shutil, sys

root, target = sys.argv[1:]
never = shutil.ignore_patterns("__pycache__", "*.egg-info")  # tests that run meanwhile write the first


def left_out(folder, names):
    ours = {name for name in names if name[0] == "." or name in ("build", "dist")} if folder == root else set()
    tests = {"data"} if folder == os.path.join(root, "tests") else set()
    return never(folder, names) | ours | tests


shutil.copytree(root, target, symlinks=True, ignore=left_out)
END
if ! "$python" -m build --wheel --no-isolation --outdir "$target" "$scratch/tree" >"$scratch/log" 2>&1; then
    cat "$scratch/log" >&2
    exit 1
fi
