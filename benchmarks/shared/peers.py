"""TorchRL as a peer, where it is installed: `buffers` has buffers and storages; None where it is not."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

import rbtool

buffers: Any
samplers: Any
checkpointers: Any
try:
    logging.disable(logging.INFO)  # importing it writes to the log
    import torchrl.data as buffers
    from torchrl.data.replay_buffers import checkpointers, samplers
except ImportError:
    buffers = samplers = checkpointers = None
    print("TorchRL is not installed here: no comparison with it (pip install torchrl)")

trees = False
"""Whether TorchRL's priority trees are there: they are compiled for a range of versions of torch."""
if buffers is not None:
    try:
        importlib.import_module("torchrl._torchrl")
        trees = True
    except ImportError:
        print("TorchRL's priority trees do not fit this torch: no comparison of priorities with it (torch 2.14.1 does)")


def sides(make: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """Make the same thing of our classes and of TorchRL's: `make` takes the buffers and the samplers of a library."""
    made = {"ours": make(rbtool, rbtool)}
    return made if buffers is None else made | {"TorchRL": make(buffers, samplers)}
