#!/usr/bin/env bash
# Try what needs no torch with other versions of Python that are on this machine: try_pythons.sh PYTHON VERSION...
#
# PYTHON builds the wheel. It is installed with its dependencies but torch and tensordict, and lists, converts, inspects
# and checks a dataset. Says one line a version, and shows what the failing command said.
set -euo pipefail
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
shift
tools=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$tools/../.." && pwd)

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/empty"
cd "$scratch/empty"
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV
export RBTOOL_HOME=$scratch/home RBTOOL_OFFLINE=1

attempt() {
    if ! "$@" >"$scratch/out" 2>"$scratch/err"; then
        echo "error: Python $version: this failed: $*" >&2
        tail -n 30 "$scratch/out" "$scratch/err" >&2
        exit 1
    fi
}

interpreter() { # of a version, by its name on the path, or else among pyenv's
    for one in "python$1" "$(pyenv root 2>/dev/null || true)"/versions/"$1".*/bin/python; do
        if "$one" -c 'import ensurepip, venv' 2>/dev/null; then
            echo "$one"
            return
        fi
    done
}

version="of the build"
attempt "$tools/build_wheel.sh" "$python" "$scratch/wheel"
attempt "$python" -c '
import sys, tomllib
dependencies = tomllib.load(open(sys.argv[1], "rb"))["project"]["dependencies"]
print(*(one for one in dependencies if not one.startswith(("torch>", "tensordict>"))), sep="\n")' "$root/pyproject.toml"
mv "$scratch/out" "$scratch/requirements.txt"

for version in "$@"; do
    found=$(interpreter "$version")
    if [[ -z $found ]]; then
        echo "Python $version is not on this machine"
        continue
    fi
    venv=$scratch/$version
    attempt "$found" -m venv "$venv"
    attempt "$venv/bin/python" -m pip install -qq -c "$root/constraints.txt" -r "$scratch/requirements.txt"
    attempt "$venv/bin/python" -m pip install -qq --no-deps "$scratch"/wheel/*.whl
    rbtool=$venv/bin/rbtool
    attempt "$rbtool" --help
    attempt "$rbtool" list
    attempt "$rbtool" convert "$root/tests/data/minari/cartpole/scripted-v0" "$venv/converted" -q
    attempt "$rbtool" inspect "$venv/converted"
    attempt "$rbtool" check "$venv/converted"
    echo "Python $version: --help, list, convert, inspect and check work without torch"
done
