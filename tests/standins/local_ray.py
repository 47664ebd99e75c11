"""A Ray of two cores on this machine, for the tests of those who use one that runs already."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest


@contextlib.contextmanager
def two_cores() -> Iterator[Any]:
    """Start Ray and give its module; skip without it."""
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20)
        yield ray
        ray.shutdown()
