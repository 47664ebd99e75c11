"""Random streams of several processes: without a seed, no process draws what another one draws."""

from __future__ import annotations

import hashlib
import os

import torch
from torch.utils.data import get_worker_info

__all__ = ["Place", "branch", "place", "reseed", "stand_in"]

Place = tuple[bytes, int | None]
"""A process, and the number that a `DataLoader` gave it if it is one of its workers."""

_process = os.urandom(16)  # pids come again: the first process of every container has number 1
_inherited: tuple[int, torch.Generator] | None = None


def place() -> Place:
    """Return where this runs."""
    worker = get_worker_info()
    return _process, None if worker is None else worker.id


def reseed(generator: torch.Generator) -> None:
    """Draw from another stream from now on, of the system's entropy."""
    generator.manual_seed(int.from_bytes(os.urandom(8), "big") >> 1)


def branch(generator: torch.Generator, *key: int) -> None:
    """Draw from another stream from now on, which the state and the key determine."""
    state = generator.get_state().cpu().numpy().tobytes()
    digest = hashlib.blake2b(state + repr(key).encode(), digest_size=8).digest()
    generator.manual_seed(int.from_bytes(digest, "big") >> 1)


def stand_in() -> torch.Generator | None:
    """Return what to draw from in place of torch's own generator; None where that one may be used.

    A forked child has a copy of the parent's, so that siblings would draw alike until one of them calls
    `torch.manual_seed`, as the workers of a `DataLoader` do.
    """
    if _inherited is None or torch.initial_seed() != _inherited[0]:
        return None
    return _inherited[1]


def _after_fork() -> None:
    global _process, _inherited
    _process = os.urandom(16)
    generator = torch.Generator()
    reseed(generator)
    _inherited = torch.initial_seed(), generator


os.register_at_fork(after_in_child=_after_fork)
