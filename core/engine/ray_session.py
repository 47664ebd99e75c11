"""Ray, which is an extra: its import, the cluster of the user, or one on this machine alone."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any

from ..errors import UsageError

_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
# Outside a cluster, Ray listens on the loopback device only: its own rule for macOS and Windows, here for all systems.
_ALONE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


def imported_ray(user: str) -> Any:
    """Import Ray for `user`, which begins the message of the UsageError (a ValueError) where it is not installed."""
    try:
        with environment(_QUIET):
            import ray
            import ray._private.ray_constants
            import ray.exceptions
            import ray.job_config
    except ImportError as error:
        raise UsageError(
            f"{user} needs Ray, which is not installed here ({error})", hint="pip install 'rbtool[ray]'"
        ) from error
    return ray


def connect(ray: Any, **options: Any) -> None:
    """Connect to the cluster of RAY_ADDRESS or of the option `address`, or start a Ray on this machine.

    `options` are passed to `ray.init`. Without a cluster, `include_dashboard` is off by default, and all ports are on
    the loopback device. UsageError if the cluster cannot be reached.
    """
    address: str = options.pop("address", None) or os.environ.get("RAY_ADDRESS") or "local"
    own = address == "local"
    if own:
        options = {"include_dashboard": False} | options
    try:
        with environment(_QUIET), alone(ray) if own else contextlib.nullcontext():
            options = {"logging_level": logging.ERROR} | _without_current_folder(ray, address) | options
            ray.init(address=address, **options)
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        first_line = next(iter(str(error).splitlines()), "")
        place = "a Ray of our own" if own else f"the Ray cluster {address}"
        raise UsageError(f"{place} cannot be reached: {type(error).__name__}: {first_line}") from error


@contextlib.contextmanager
def alone(ray: Any) -> Iterator[None]:
    """Have a Ray that is started inside listen on the loopback device only."""
    constants = ray._private.ray_constants
    before = getattr(constants, "ENABLE_RAY_CLUSTER", None)  # read from the environment at the import
    constants.ENABLE_RAY_CLUSTER = False
    try:
        with environment(_ALONE):
            yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


def _without_current_folder(ray: Any, address: str) -> dict[str, Any]:
    """Keep the current folder, whose `json.py` would shadow the standard one, off the workers' import path.

    Ray puts it first there unless the job has a working folder of its own; a Ray client does not.
    """
    if address.startswith("ray://"):
        return {}
    config = ray.job_config.JobConfig()
    config._runtime_env_has_working_dir = lambda: True
    return {"job_config": config}


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables that the user has not set, inside the context."""
    ours = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)
