"""`GenDgrlSource` on loopback: trust before anything is fetched, the fault table, the local folder, the class."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conversions import FAULTS, MirrorSourceTests
from shard_files import random_dgrl, write_dgrl, write_dgrl_folder
from static_server import SOUND, Fault, StaticServer, mirror

import rbtool
from rbtool.core.errors import CorruptDataError, DatasetNotFoundError, UsageError

ID, FILE = "bigfish-1M_E", "base/1M/level_200/expert/bigfish.tar.xz"
EPISODES = random_dgrl((5, 3, 40))
PIXELS = b"".join(one["observations"][:-1].tobytes() for one in EPISODES)


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_dgrl(tmp_path_factory.mktemp("served") / "a.tar.xz", EPISODES).read_bytes()


@pytest.fixture
def server(content: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StaticServer]:
    monkeypatch.setenv("GEN_DGRL_DATASET_DIR", str(tmp_path / "local"))
    with mirror(StaticServer({FILE: content}), "GEN_DGRL_URL", monkeypatch, tmp_path / "store") as running:
        yield running


class TestSource(MirrorSourceTests):
    name, id, count = "gen_dgrl", ID, 128


def pixels(dataset: str) -> bytes:
    found: bytes = rbtool.load_dataset(dataset)[:]["observation"].numpy().tobytes()
    return found


def test_without_trust_nothing_is_fetched(server: StaticServer) -> None:
    with pytest.raises(UsageError, match="bigfish-1M_E is not read: its files are pickles") as caught:
        rbtool.download("gen_dgrl", ID)
    assert "--trust-pickle" in caught.value.hint
    assert server.asked == []


def test_a_dataset_is_downloaded_and_found_by_its_id(server: StaticServer) -> None:
    result = rbtool.download("gen_dgrl", ID, trust_pickle=True)
    assert (result.id, result.steps, result.episodes, result.path.name) == (ID, 48, 3, ID)
    assert pixels(f"gen_dgrl:{ID}") == PIXELS
    server.asked.clear()
    assert rbtool.download("gen_dgrl", ID, trust_pickle=True).already_there
    assert rbtool.download("gen_dgrl", ID).already_there
    assert server.asked == []


FAULTS_HERE = FAULTS | {
    "corrupt at its end": ([SOUND, Fault(corrupt=-40)], CorruptDataError),
    "corrupt at its start": ([SOUND, Fault(corrupt=20)], CorruptDataError),
}


@pytest.mark.parametrize("case", FAULTS_HERE)
def test_the_fault_table(case: str, server: StaticServer, content: bytes, tmp_path: Path) -> None:
    faults, kind = FAULTS_HERE[case]
    server.faults[FILE] = [
        replace(one, corrupt=None if one.corrupt is None else one.corrupt % len(content)) for one in faults
    ]
    if kind is not None:
        with pytest.raises(kind):
            rbtool.download("gen_dgrl", ID, trust_pickle=True)
        assert not (tmp_path / "store" / "gen_dgrl" / ID).exists()
        server.faults.clear()
        rbtool.download("gen_dgrl", ID, trust_pickle=True, force=True)
    else:
        rbtool.download("gen_dgrl", ID, trust_pickle=True)
    assert pixels(f"gen_dgrl:{ID}") == PIXELS


def test_an_unknown_id_names_the_nearest(server: StaticServer) -> None:
    with pytest.raises(DatasetNotFoundError, match="among 128") as caught:
        rbtool.download("gen_dgrl", "bigfsh-1M_E", trust_pickle=True)
    assert ID in f"{caught.value} {caught.value.hint}"


def test_the_local_folder_serves_without_the_network(
    content: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RBTOOL_HOME", str(tmp_path / "store"))
    monkeypatch.setenv("RBTOOL_OFFLINE", "1")
    monkeypatch.setenv("GEN_DGRL_DATASET_DIR", str(tmp_path / "local"))
    with pytest.raises(DatasetNotFoundError, match="looked for"):
        rbtool.download("gen_dgrl", ID, local=True, trust_pickle=True)
    file = tmp_path / "local" / FILE.removeprefix("base/")
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    assert rbtool.download("gen_dgrl", ID, local=True, trust_pickle=True).path.name == ID
    assert pixels(f"gen_dgrl:{ID}") == PIXELS


@pytest.mark.parametrize("form", [".tar", ""])
def test_local_copies_that_are_unpacked(form: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RBTOOL_HOME", str(tmp_path / "store"))
    monkeypatch.setenv("RBTOOL_OFFLINE", "1")
    monkeypatch.setenv("GEN_DGRL_DATASET_DIR", str(tmp_path / "local"))
    place = tmp_path / "local" / "1M" / "level_200" / "expert" / f"bigfish{form}"
    (write_dgrl if form else write_dgrl_folder)(place, EPISODES)
    assert rbtool.download("gen_dgrl", ID, local=True, trust_pickle=True).request["id"] == ID
    assert pixels(f"gen_dgrl:{ID}") == PIXELS


def test_the_documented_class(server: StaticServer) -> None:
    data = rbtool.GenDGRLExperienceReplay(ID, 6)
    assert len(data) == 48
    whole, batch = data[:], data.sample()
    assert whole["observation"].numpy().tobytes() == PIXELS
    following = b"".join(one["observations"][1:].tobytes() for one in EPISODES)
    assert whole["next", "observation"].numpy().tobytes() == following
    assert (batch["observation"].shape, batch["next", "reward"].shape) == ((6, 3, 4, 4), (6, 1))
    assert np.flatnonzero(whole["next", "done"].numpy()).tolist() == [4, 7, 47]
    with pytest.raises(RuntimeError):
        data.extend(batch)
    assert rbtool.GenDGRLExperienceReplay.available_datasets[0] == "bigfish-10M"
    server.asked.clear()
    assert len(rbtool.GenDGRLExperienceReplay(ID, 6, download=False)) == 48
    assert server.asked == []
