"""Ray, an optional dependency: importing it, connecting to a cluster, and an executor whose workers are Ray actors."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import UsageError, not_installed
from .pool import STOP_SECONDS, Scheduler, WorkerHandle
from .tasks import Job, Limits, WorkerFailed, error_text
from .worker import START, CallServer, pickled

_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
# Outside a cluster, Ray listens on the loopback device only: its own rule for macOS and Windows, here for all systems.
_ALONE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


def imported_ray(user: str) -> Any:
    """Import Ray; UsageError (a ValueError) if it is not installed, with a message that begins with `user`."""
    try:
        with environment(_QUIET):
            import ray
            import ray._private.ray_constants
            import ray.exceptions
            import ray.job_config
    except ImportError as error:
        raise not_installed(f"{user} needs Ray", "ray", error) from error
    return ray


def connect(ray: Any, **options: Any) -> None:
    """Connect to the cluster of the option `address` or of RAY_ADDRESS, or start Ray on this machine.

    `options` are passed to `ray.init`. On this machine `include_dashboard` is off by default, and all ports are on the
    loopback device. UsageError if the cluster cannot be reached.
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
    """Make Ray, if it is started in this context, listen on the loopback device only."""
    constants = ray._private.ray_constants
    before = getattr(constants, "ENABLE_RAY_CLUSTER", None)  # Ray reads the environment only when it is imported
    constants.ENABLE_RAY_CLUSTER = False
    try:
        with environment(_ALONE):
            yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


def _without_current_folder(ray: Any, address: str) -> dict[str, Any]:
    """Return an option that keeps the current folder off the workers' import path, where its `json.py` could be found.

    Ray puts the folder first on the path unless the job has its own working folder; a Ray client does not.
    """
    if address.startswith("ray://"):
        return {}
    config = ray.job_config.JobConfig()
    config._runtime_env_has_working_dir = lambda: True
    return {"job_config": config}


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables in this context, unless the user has set them."""
    ours = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


_STORE_BYTES = 100 * 2**20  # messages are small: paths, row numbers, digests


class _Actor:
    """The worker's side, which Ray runs in a process of a node."""

    def __init__(self, path: Sequence[str]) -> None:
        os.dup2(2, 1)  # prints of the function must not mix with the driver's output
        sys.path.extend(entry for entry in path if entry not in sys.path)
        self._serving = CallServer()

    def answer(self, call: bytes) -> bytes:
        """Answer a pickled call."""
        return pickled(self._serving.answer(*pickle.loads(call)))  # safe: from the driver, whose code runs here anyway


class _ActorWorker(WorkerHandle):
    def __init__(self, ray: Any) -> None:
        super().__init__()
        self._ray = ray
        actor = ray.remote(num_cpus=1, max_restarts=0, max_task_retries=0)(_Actor)
        self._actor = actor.remote([str(entry) for entry in sys.path])
        self.answers: deque[Any] = deque()

    def send(self, call: bytes) -> None:
        self.answers.append(self._actor.answer.remote(call))

    def received(self) -> bytes | None:
        if not self.answers or not self._ray.wait([self.answers[0]], timeout=0)[0]:
            return None
        try:
            data: bytes = self._ray.get(self.answers.popleft())
        except self._ray.exceptions.RayError as error:
            raise WorkerFailed(f"a worker process on the cluster was lost: {error_text(error)}", "") from None
        return data

    def is_lost(self) -> bool:
        return False  # the end of an actor only shows when an answer is awaited

    def stop(self) -> None:
        self._ray.kill(self._actor)
        if self.answers:  # each fails when the process has ended
            self._ray.wait(list(self.answers), num_returns=len(self.answers), timeout=STOP_SECONDS)


class RayExecutor(Scheduler):
    """Runs tasks in Ray actors of one core each.

    All nodes need rbtool, and the source and the destination under the same paths, in a shared folder. Uses an existing
    connection of this process; otherwise connects to the cluster of the environment variable RAY_ADDRESS, or starts one
    on this machine with `workers` cores, until `close`. UsageError if Ray is not installed or the cluster cannot be
    reached.
    """

    def __init__(self, job: Job, workers: int, limits: Limits) -> None:
        workers = max(workers, 1)
        super().__init__(workers, limits, pickle.dumps((START, (job.portable(),))))
        self._ray = imported_ray("engine ray")
        self._started = not self._ray.is_initialized()
        try:
            if self._started:
                own = (
                    {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": workers, "object_store_memory": _STORE_BYTES}
                )
                connect(self._ray, **own)
            self._fill(workers)
        except BaseException:
            self.close()
            raise

    def _start(self) -> WorkerHandle:
        return _ActorWorker(self._ray)

    def _await(self, workers: Sequence[WorkerHandle], seconds: float) -> Sequence[WorkerHandle]:
        first = {worker.answers[0]: worker for worker in workers if isinstance(worker, _ActorWorker) and worker.answers}
        ready, _ = self._ray.wait(list(first), timeout=seconds)
        return [first[answer] for answer in ready]

    def close(self) -> None:
        """End all actors, and the connection if this executor made it."""
        if self._ray.is_initialized():
            super().close()
            if self._started:
                self._ray.shutdown()
