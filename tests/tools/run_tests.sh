#!/usr/bin/env bash
# Run pytest and, at the same time, the wheel check: run_tests.sh PYTHON [ARGUMENT OF PYTEST...]
#
# What the wheel check says comes after what pytest says. The exit code is that of pytest, or else of the wheel check.
set -uo pipefail
python=$1
shift
tools=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

said=$(mktemp)
# A process group of its own, so that all of it ends with this script.
set -m
"$tools/wheel_check.sh" "$python" >"$said" 2>&1 </dev/null &
wheel=$!
set +m
trap 'kill -- "-$wheel" 2>/dev/null; rm -f "$said"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# In a new checkout, each worker would compile all tests and kernels: one process does so for all, next to the wheel
# check. What is wrong with them, the tests say.
if ! compgen -G "$tools/../__pycache__/conftest*" >/dev/null; then
    "$python" >/dev/null 2>&1 - <<'END'
import pytest

import rbtool.converters.rlds.compiled
from rbtool.core.kernels import compiled, compiled_hashes, compiled_tensors, compiled_trees, slices

slices.compiled_draw()
pytest.main(["--collect-only", "-qq"])
END
fi
"$python" -m pytest "$@"
code=$?
wait "$wheel"
checked=$?
cat "$said"
exit $((code ? code : checked))
