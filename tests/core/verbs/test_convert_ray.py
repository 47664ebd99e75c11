"""`convert --engine ray`: workers of a cluster write the bytes that one process writes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import two_cores
from table_files import flat, random_episodes, write_d4rl
from waiting import HANG, wait_until

import rbtool

LENGTHS = [3, 1, 9, 4, 1, 30, 2, 5, 6, 40] * 3


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_d4rl(tmp_path / "source.hdf5", flat(random_episodes(LENGTHS)))


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """A Ray of two cores."""
    with two_cores() as ray:
        yield ray


def test_a_missing_ray_is_an_error_with_its_installation(source: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(rbtool.UsageError, match="not installed") as caught:
        rbtool.convert(source, tmp_path / "made", num_workers=2, engine="ray")
    assert caught.value.hint == "pip install 'rbtool[ray]'"
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(("engine", "message"), [("ray", "needs workers"), ("spark", "is unknown")])
def test_ray_without_workers_and_unknown_engines_are_refused(source, tmp_path, engine: str, message: str) -> None:
    with pytest.raises(rbtool.UsageError, match=message):
        rbtool.convert(source, tmp_path / "made", engine=engine)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ted", "packed"])
def test_workers_on_ray_write_the_bytes_of_one_process(ray: Any, source: Path, layout: str, tmp_path: Path) -> None:
    expected = rbtool.convert(source, tmp_path / "one", layout=layout).content_digest
    for workers in (1, 2):
        made = rbtool.convert(source, tmp_path / f"{workers}", layout=layout, num_workers=workers, engine="ray")
        assert made.content_digest == expected
        assert not rbtool.check(made.path).findings


_HELD = """
import sys, time
from pathlib import Path
import rbtool
from rbtool.core.engine.workspace import Journal
plain, go, count = Journal.append, Path(sys.argv[1]).parent / "go", 0
def held(self, document):
    global count
    plain(self, document)
    count += 1
    while count == 3 and not go.exists():
        time.sleep(0.01)
Journal.append = held
made = rbtool.convert(sys.argv[1], sys.argv[2], num_workers=2, engine="ray", layout=sys.argv[3], resume=True)
print(made.content_digest, flush=True)
"""


@contextlib.contextmanager
def under_way(source: Path, layout: str) -> Iterator[subprocess.Popen[str]]:
    """A conversion on a Ray of its own that has finished some chunks and waits for the file `go`."""
    with subprocess.Popen(
        [sys.executable, "-c", _HELD, source, source.parent / "made", layout], stdout=subprocess.PIPE, text=True,
        env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"},
    ) as process:  # fmt: skip
        try:
            wait_until(lambda: process.poll() is not None or lines_of_journal(source.parent) >= 3, "progress")
            assert process.poll() is None
            yield process
        finally:
            process.kill()


def lines_of_journal(folder: Path) -> int:
    return sum(len(path.read_bytes().splitlines()) for path in folder.glob(".made.*/work/journal.jsonl"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ted", "packed"])
def test_a_killed_driver_continues_with_any_number_of_workers(source: Path, layout: str, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    with under_way(source, layout) as process:
        process.kill()
    expected = rbtool.convert(source, tmp_path / "one", layout=layout)
    made = rbtool.convert(source, tmp_path / "made", layout=layout, num_workers=1, resume=True)  # not even with Ray
    assert made.content_digest == expected.content_digest
    assert not rbtool.check(made.path).findings
    assert not list(tmp_path.glob(".made*"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ted", "packed"])
def test_the_task_of_a_killed_worker_is_run_again(source: Path, layout: str, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    expected = rbtool.convert(source, tmp_path / "one", layout=layout).content_digest
    with under_way(source, layout) as process:
        children = psutil.Process(process.pid).children(recursive=True)
        next(child for child in children if "_Actor" in child.cmdline()[0]).kill()
        (tmp_path / "go").touch()
        printed, _ = process.communicate(timeout=HANG)
    assert (process.returncode, printed.split()[-1]) == (0, expected)  # after what Ray prints about the worker


_NODES = """
import os, sys
from pathlib import Path
from ray.cluster_utils import Cluster
import rbtool
from rbtool.core.engine.workspace import Journal

source, folder = Path(sys.argv[1]), Path(sys.argv[2])
Path(folder, "doubling.py").write_text("def double(steps):\\n    steps['action'] *= 2\\n    return steps\\n")
double = f"{folder}/doubling.py:double"
one = rbtool.convert(source, folder / "one")
doubled = rbtool.preprocess(one.path, double, folder / "doubled", num_workers=0)
node = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
cluster = Cluster(initialize_head=True, head_node_args={**node, "num_cpus": 0, "include_dashboard": False})
os.environ["RAY_ADDRESS"] = cluster.address
plain, nodes, count = Journal.append, [], 0

def append(self, document):
    global count
    plain(self, document)
    count += 1
    if count == 3:
        cluster.remove_node(nodes.pop(), allow_graceful=False)

Journal.append = append
try:
    for expected, verb, given, more in (
        (one, rbtool.convert, (source, folder / "converted"), {}),
        (doubled, rbtool.preprocess, (one.path, double, folder / "processed"), {"chunk_size": 20, "retries": 2}),
    ):
        nodes[:], count = [*nodes, *(cluster.add_node(**node) for _ in range(3 - len(nodes)))], 0
        made = verb(*given, num_workers=3, engine="ray", **more)
        assert len(nodes) == 2, count
        assert made.content_digest == expected.content_digest, verb
    print("alike")
finally:
    cluster.shutdown()
"""


@pytest.mark.slow
def test_a_cluster_that_loses_a_node_makes_the_same_bytes(source: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    done = subprocess.run(
        [sys.executable, "-c", _NODES, source, tmp_path], capture_output=True, text=True, check=False, timeout=HANG,
        env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "alike" in done.stdout.splitlines()
