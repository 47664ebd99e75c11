"""How worker processes come to be: which ways there are, and which one is safe here."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Literal, TypeAlias, get_args

from ..errors import UsageError
from .forkserver import ForkServerStarter
from .job import Job
from .processes import ForkStarter, SpawnStarter, Starter

__all__ = ["START_METHODS", "StartMethod", "default_start_method", "starter_of"]

StartMethod: TypeAlias = Literal["fork", "forkserver", "spawn"]

START_METHODS: tuple[StartMethod, ...] = get_args(StartMethod)

_THREADED = ("jaxlib", "ray", "tensorflow")
"""Libraries whose own threads do not survive a fork, and who do not know of it."""


def default_start_method() -> StartMethod:
    """Choose `fork`, the quickest by far, where this process can be forked without harm.

    Not so where CUDA runs, nor beside libraries whose threads do not survive a fork: then a fresh process is forked on
    Linux, and a new one started for each worker elsewhere, where system libraries do not allow for forks. Threads of
    the caller's own are no hindrance, as for the workers of torch's DataLoader: a worker has imported what it needs
    before, has one torch thread, and its own standard streams.
    """
    if sys.platform != "linux":
        return "spawn"
    return "fork" if _can_be_forked() else "forkserver"


def _can_be_forked() -> bool:
    if any(name in sys.modules for name in _THREADED):
        return False
    torch = sys.modules.get("torch")
    return torch is None or not torch.cuda.is_initialized()


def starter_of(method: str | None, job: Job) -> Starter:
    """Return what starts workers in this way, by default the best one; UsageError for another word."""
    method = method or default_start_method()
    if method not in START_METHODS:
        ways = ", ".join(START_METHODS)
        raise UsageError(f"{method!r} is no way to start worker processes: {ways} are")
    if method == "fork":
        return ForkStarter(job)
    job = replace(job, work=job.work.portable())
    return ForkServerStarter(job) if method == "forkserver" else SpawnStarter(job)
