"""Specs of rbtool and TorchRL in one process, whichever library comes first: the checks are in `bridge_checks.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from peer_checks import require_checks
from processes import Interpreter

CHECKS = Path(__file__).with_name("bridge_checks.py")


@pytest.mark.peer
@pytest.mark.parametrize("first", ["rbtool", "torchrl"])
def test_specs_work_in_the_other_library(first: str) -> None:
    pytest.importorskip("torchrl")
    require_checks(CHECKS, first)


WITHOUT_TORCHRL = """
import sys
import rbtool
spec = rbtool.Composite(a=rbtool.OneHot(3))
try:
    spec.to_torchrl()
except ImportError as error:
    print(error)
assert not any(name.partition(".")[0] == "torchrl" for name in sys.modules)
"""


def test_torchrl_is_never_imported(interpreter: Interpreter) -> None:
    done = interpreter.run(WITHOUT_TORCHRL)
    assert (done.returncode, done.stderr) == (0, "")
    assert "torchrl" in done.stdout
