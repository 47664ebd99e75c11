"""The engine on a local Ray of two worker processes; without Ray only that it is missed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import two_cores
from works import TASKS, Acting, count_set_up, counted_set_ups, end_at_20, job_of, surroundings

import rbtool
from rbtool.core.engine.pool import WorkerHandle
from rbtool.core.engine.ray_cluster import RayExecutor
from rbtool.core.engine.tasks import Limits, TaskFailed
from rbtool.core.errors import UsageError
from rbtool.core.format.manifest import Manifest
from rbtool.core.testing.datasets import write_walks


@pytest.fixture(scope="module")
def walks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("walks") / "walks"
    write_walks(folder, [(6, "terminated"), (1, "truncated"), (9, "open"), (4, "both")] * 5)
    return folder


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """A Ray that runs before us and after us."""
    with two_cores() as ray:
        yield ray


def test_a_missing_ray_is_an_error_with_its_installation(walks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match="not installed") as caught:
        RayExecutor(job_of(walks, Acting(surroundings)), 2, Limits())
    assert caught.value.hint == "pip install 'rbtool[ray]'"


@pytest.mark.slow
def test_the_replacement_of_a_lost_worker_gets_the_same_set_up(ray: Any, walks: Path) -> None:
    with RayExecutor(job_of(walks, Acting(surroundings)), 2, Limits(retries=2)) as executor:
        assert executor.call("measure", TASKS[0])["threads"] == 1
        executor.broadcast("use_processor", Acting(counted_set_ups, count_set_up))
        executor.broadcast("use_processor", Acting(counted_set_ups, count_set_up))
        killed, seen = 0, set()
        for _, (pid, times) in executor.run("measure", TASKS):
            assert times == 2
            if not killed:
                os.kill(pid, signal.SIGKILL)
                killed = pid
            seen.add(pid)
        again = {pid for _, (pid, _) in executor.run("measure", TASKS)}
    assert len(seen | again) > 1
    assert killed not in again
    assert ray.is_initialized()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "hang"])
def test_a_task_that_costs_each_worker_fails_alone(ray: Any, walks: Path, how: str, monkeypatch) -> None:
    limits, own = Limits(timeout=2.0 if how == "hang" else None, retries=1), WorkerHandle.left

    def left(worker: WorkerHandle, timeout: float | None) -> float:
        """On a busy machine, tasks that do not hang take longer, too."""
        hangs = bool(worker.requests) and worker.requests[0].task == TASKS[2]
        return own(worker, timeout) if hangs else max(own(worker, timeout), 0.02)

    monkeypatch.setattr(WorkerHandle, "left", left)
    with RayExecutor(job_of(walks, Acting(end_at_20[how])), 2, limits) as executor:
        found = {task.index: answer for task, answer in executor.run("measure", TASKS)}
    failed = found.pop(2)
    assert isinstance(failed, TaskFailed)
    expected = {"kill": "a worker process on the cluster was lost", "hang": "a worker process took longer than 2 s"}
    assert str(failed.cause.args[0]).startswith(expected[how])
    assert found == {task.index: task.start for task in TASKS if task.index != 2}


@pytest.mark.slow
def test_a_cluster_of_fewer_cores_than_workers_does_it_all(ray: Any, walks: Path, tmp_path: Path) -> None:
    (tmp_path / "prep.py").write_text("def f(td): return td\n")
    made = rbtool.preprocess(
        walks, f"{tmp_path}/prep.py:f", tmp_path / "made", num_workers=3, chunk_size=9, engine="ray"
    )
    assert made.content_digest == Manifest.load(walks).content_digest


SCRIPT = """
import sys
import rbtool
source, dest = sys.argv[1:]
factor = 3.0
def function(td):
    import torch
    print("printed", torch.get_num_threads())
    td["next", "reward"] = td["next", "reward"] * factor
    td["noise"] = torch.rand(len(td), 2)
    return td
result = rbtool.preprocess(source, function, dest, num_workers=2, chunk_size=9, engine="ray")
import ray
assert not ray.is_initialized()
same = rbtool.preprocess(source, function, dest + "-here", num_workers=0, chunk_size=9)
assert same.content_digest == result.content_digest
print(result.content_digest)
"""


@pytest.mark.slow
def test_a_ray_of_our_own_gives_the_same_digest_and_is_left(walks: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    command = [sys.executable, "-c", SCRIPT, str(walks), str(tmp_path / "made")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [Manifest.load(tmp_path / "made").content_digest]


@pytest.mark.slow
def test_workers_on_a_cluster_import_nothing_from_it(planted: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    write_walks(tmp_path / "walks", [(20, "terminated")])
    with RayExecutor(job_of(tmp_path / "walks", Acting(surroundings)), 1, Limits()) as executor:
        executor.call("measure", TASKS[0])
    assert not planted.exists()


@pytest.mark.slow
def test_a_cluster_out_of_reach_is_an_error(walks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    ray.shutdown()
    monkeypatch.setenv("RAY_ADDRESS", "auto")  # an address takes Ray two minutes to give up
    # A Ray that another test runs at the same time is not found.
    monkeypatch.setattr("ray._private.services._find_address_from_flag", lambda _flag: set())
    with pytest.raises(UsageError, match="the Ray cluster auto cannot be reached: ConnectionError"):
        RayExecutor(job_of(walks, Acting(surroundings)), 2, Limits())
