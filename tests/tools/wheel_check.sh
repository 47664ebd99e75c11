#!/usr/bin/env bash
# Install the wheel and its dependencies into an empty environment and use it from an empty folder, so that a
# forgotten sub-package, data file or dependency shows: wheel_check.sh PYTHON
#
# Says one line when all is well, and shows what the failing command said otherwise.
set -euo pipefail
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
tools=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$tools/../.." && pwd)
dataset=$root/tests/data/minari/cartpole/scripted-v0

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/empty"
cd "$scratch/empty"
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV
export RBTOOL_HOME=$scratch/home RBTOOL_OFFLINE=1

attempt() {
    if ! "$@" >"$scratch/out" 2>"$scratch/err"; then
        echo "error: wheel check: this failed: $*" >&2
        tail -n 30 "$scratch/out" "$scratch/err" >&2
        exit 1
    fi
}

attempt "$tools/build_wheel.sh" "$python" "$scratch/wheel"
wheel=$(echo "$scratch"/wheel/*.whl)
attempt "$python" "$tools/wheel_contents.py" "$wheel"

attempt "$python" -m venv "$scratch/venv"
rbtool=$scratch/venv/bin/rbtool
# The requirements are those of the wheel, the versions those of the checkout.
# Few of the modules are imported: pip would compile all, which takes most of its time.
attempt "$scratch/venv/bin/python" -m pip install -qq --no-compile -c "$root/constraints.txt" "$wheel"
attempt "$scratch/venv/bin/python" -m pip check

attempt "$rbtool" --version
attempt "$rbtool" convert "$dataset" "$scratch/converted" -q
attempt "$rbtool" inspect "$scratch/converted" --json
mv "$scratch/out" "$scratch/document.json"
attempt "$python" -m json.tool "$scratch/document.json"
attempt "$rbtool" check "$scratch/converted"

echo "wheel check: $(basename "$wheel") installs into an empty environment, converts, inspects and checks"
