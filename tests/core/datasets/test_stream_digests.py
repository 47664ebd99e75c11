"""Streams of a hub compare what they fetch with digests: other bytes are fetched again, or are an error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub import Fault, Hub
from streaming import batches_of, in_process

from rbtool.core.testing.datasets import write_walks

EPISODES: Any = [(6, "terminated"), (1, "truncated"), (9, "open"), (31, "both")] * 12


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the repository `org/ted`."""
    root = tmp_path_factory.mktemp("hub")
    write_walks(root / "org" / "ted", EPISODES)
    return root


@pytest.fixture
def hub(datasets: Path) -> Iterator[Hub]:
    with Hub(datasets, lfs_threshold=1000) as served:
        yield served


@pytest.fixture
def environment(hub: Hub, tmp_path: Path) -> dict[str, str]:
    return hub.environment(tmp_path / "home") | {"RBTOOL_HOME": str(tmp_path / "root"), "RBTOOL_RETRIES": "3:0.01"}


@pytest.mark.parametrize("leaf", ["episode", "next/reward"])
def test_other_bytes_than_the_episode_table_states_are_fetched_again(
    datasets: Path, hub: Hub, environment: dict[str, str], leaf: str
) -> None:
    hub.faults.append(Fault(f"GET .*/resolve/[^/]+/{leaf}.memmap", "corrupt"))
    found = in_process(environment, {"dataset": "hf://org/ted"})[0]
    assert not hub.faults[0].times
    assert found == batches_of(str(datasets / "org" / "ted"))


@pytest.mark.parametrize(("leaf", "said"), [("episode", "number of another"), ("next/reward", "the return of an")])
def test_other_bytes_than_the_episode_table_states_are_an_error(
    hub: Hub, environment: dict[str, str], leaf: str, said: str
) -> None:
    hub.faults.append(Fault(f"GET .*/resolve/[^/]+/{leaf}.memmap", "corrupt", times=99))
    found = in_process(environment, {"dataset": "hf://org/ted"})[0]
    assert found["error"] == "CorruptDataError"
    assert said in found["message"]


@pytest.mark.parametrize("leaf", ["observation", "action", "next/observation"])
def test_a_shard_with_all_of_a_file_is_compared_with_its_digest(
    hub: Hub, environment: dict[str, str], leaf: str, tmp_path: Path
) -> None:
    hub.root = tmp_path / "hub"
    write_walks(hub.root / "org" / "small", EPISODES[:3])
    hub.rescan()
    hub.faults.append(Fault(f"GET .*/{leaf}.memmap", "corrupt", times=99))
    failed = in_process(environment, {"dataset": "hf://org/small"})[0]
    assert failed["error"] == "CorruptDataError"
    assert f"{leaf}.memmap" in failed["message"]
    hub.faults.clear()
    assert in_process(environment, {"dataset": "hf://org/small"})[0] == batches_of(str(hub.root / "org" / "small"))
