"""`D4rlSource`: the table of published datasets, mirrors in order, what is verified, and the d4rl package's cache."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from cases import each
from conversions import MirrorSourceTests
from static_server import Fault, StaticServer, mirror
from table_files import flat, random_episodes, write_d4rl

import rbtool
from rbtool.converters.d4rl import reader as datasets
from rbtool.converters.d4rl.reader import D4rlSource, dataset_named, dataset_of_file, published
from rbtool.core.errors import (
    AuthorisationError,
    CheckFailed,
    CorruptDataError,
    DatasetNotFoundError,
    NetworkError,
    UsageError,
)
from rbtool.core.format.locate import reader_class

KITCHEN = "kitchen-partial-v0"  # its checksum is not known
HOPPER = "hopper-medium-v2"


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    episodes = random_episodes((280, 280, 30), ends=("timeout", "timeout", "none"))
    return write_d4rl(tmp_path_factory.mktemp("file") / "a.hdf5", flat(episodes, timeouts=False)).read_bytes()


@pytest.fixture
def server(content: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StaticServer]:
    files = {f"base/{dataset_named(name).file}": content for name in (KITCHEN, HOPPER)}
    with mirror(StaticServer(files), "D4RL_URL", monkeypatch, tmp_path / "store") as running:
        yield running


@pytest.fixture
def known_hopper(content: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The table with the size and sha256 of what the server has."""
    lines = datasets._TABLE.read_text().splitlines()
    digest = hashlib.sha256(content).hexdigest()
    changed = [
        "\t".join((*line.split("\t")[:3], str(len(content)), digest)) if line.startswith(f"{HOPPER}\t") else line
        for line in lines
    ]
    (tmp_path / "datasets.tsv").write_text("\n".join(changed) + "\n")
    monkeypatch.setattr(datasets, "_TABLE", tmp_path / "datasets.tsv")
    published.cache_clear()
    yield
    published.cache_clear()


class TestSource(MirrorSourceTests):
    name, id, count = "d4rl", KITCHEN, 179


def test_the_table_has_all_179_datasets() -> None:
    found = published()
    assert len(found) == 179
    folders = Counter(dataset.file.partition("/")[0] for dataset in found.values())
    assert folders == {
        "gym_mujoco": 21, "gym_mujoco_v1": 24, "gym_mujoco_v2": 24, "bullet": 24, "maze2d": 20, "hand_dapg": 16,
        "hand_dapg_v1": 12, "ant_maze_new": 12, "ant_maze_v1": 6, "ant_maze_v2": 6, "carla": 5, "flow": 4,
        "kitchen": 3, "minigrid": 2,
    }  # fmt: skip
    for dataset in found.values():
        assert dataset.horizon in {50, 100, 150, 200, 250, 280, 300, 500, 600, 700, 750, 800, 1000}
        assert (dataset.size is None) == (dataset.sha256 is None)
        assert dataset.sha256 is None or (len(dataset.sha256) == 64 and int(dataset.sha256, 16) >= 0)
    digests = [dataset.sha256 for dataset in {one.file: one for one in found.values()}.values() if dataset.sha256]
    assert len(set(digests)) == len(digests)


@each(
    ("name", "file", "horizon"),
    [
        ("maze2d-open-v0", "maze2d/maze2d-open-sparse.hdf5", 150),
        ("kitchen-complete-v0", "kitchen/mini_kitchen_microwave_kettle_light_slider-v0.hdf5", 280),
        ("hopper-random-v0", "gym_mujoco/hopper_random.hdf5", 1000),
        ("walker2d-medium-replay-v0", "gym_mujoco/walker_mixed.hdf5", 1000),
        ("pen-human-v0", "hand_dapg/pen-v0_demos_clipped.hdf5", 100),
        ("antmaze-umaze-v0", "ant_maze_new/Ant_maze_u-maze_noisy_multistart_False_multigoal_False_sparse.hdf5", 700),
    ],
)
def test_the_file_name_is_not_the_id(name: str, file: str, horizon: int) -> None:
    assert (dataset_named(name).file, dataset_named(name).horizon) == (file, horizon)


def test_a_file_is_known_by_its_name_also_after_a_second_download() -> None:
    for name in ("hopper_medium-v2.hdf5", "hopper_medium-v2 (1).hdf5", "hopper_medium-v2(2).hdf5"):
        found = dataset_of_file(name)
        assert found is not None
        assert found.id == HOPPER
    shared = dataset_of_file("door-v0_demos_clipped.hdf5")
    assert shared is not None
    assert shared.id == "door-human-v0"
    assert dataset_of_file("mine.hdf5") is None


def test_an_unknown_id_names_the_nearest(server: StaticServer) -> None:
    for name in ("hopper-medum-v2", "hopper-medium-v7"):
        with pytest.raises(DatasetNotFoundError, match="among 179") as caught:
            rbtool.download("d4rl", name)
        assert "hopper-medium-v2" in caught.value.hint
    with pytest.raises(UsageError, match="is not a dataset id"):
        rbtool.download("d4rl", "../hopper-medium-v2")
    assert server.asked == []


def test_the_list_has_the_sizes_of_files(server: StaticServer) -> None:
    assert {entry.name: entry.bytes for entry in rbtool.list_remote("d4rl").datasets}[f"d4rl:{HOPPER}"] == 152_756_557


def test_an_unverified_file_is_opened_and_converted_with_the_horizon_of_its_id(server: StaticServer) -> None:
    result = rbtool.download("d4rl", "kitchen-partial")
    assert (result.id, result.resolved, result.episodes) == (KITCHEN, "latest", 3)
    assert any("280 steps of kitchen-partial-v0" in note for note in result.notes)
    assert any(note.startswith("unverified by the remote") for note in result.notes)
    assert result.fetched_from == server.address(f"base/{dataset_named(KITCHEN).file}")
    server.asked.clear()
    assert rbtool.download("d4rl", KITCHEN).already_there
    assert server.asked == []
    buffer = rbtool.load_dataset(f"d4rl:{KITCHEN}", batch_size=4)
    assert buffer.sample()["next", "observation"].shape == (4, 3)


def test_a_known_file_is_verified_and_its_server_asked_for_nothing_else(
    server: StaticServer, known_hopper: None
) -> None:
    assert rbtool.download("d4rl", HOPPER, dry_run=True).fetch is not None
    assert server.asked == []
    result = rbtool.download("d4rl", HOPPER)
    assert not any(note.startswith("unverified") for note in result.notes)
    assert len(server.asked) == 1
    assert rbtool.download("d4rl", HOPPER, frozen=True).already_there
    assert rbtool.inspect(result.path).provenance[0].inputs[dataset_named(HOPPER).file_name].startswith("sha256:")


def test_other_bytes_than_the_known_ones_are_refused(server: StaticServer, known_hopper: None, tmp_path: Path) -> None:
    server.faults[f"base/{dataset_named(HOPPER).file}"] = [Fault(corrupt=9000)]
    with pytest.raises(CorruptDataError, match=r"hopper_medium-v2\.hdf5 is not what was announced"):
        rbtool.download("d4rl", HOPPER)
    assert not (tmp_path / "store" / "d4rl" / HOPPER).exists()


@each("body", [b"<!DOCTYPE html><html>Not today</html>", b"\x89HDF\r\n\x1a\n" + bytes(500)])
def test_what_is_no_hdf5_is_not_believed(server: StaticServer, body: bytes, tmp_path: Path) -> None:
    server.files[f"base/{dataset_named(KITCHEN).file}"] = body
    with pytest.raises(CorruptDataError, match="sends no D4RL file") as caught:
        rbtool.download("d4rl", KITCHEN)
    assert "D4RL_URL" in caught.value.hint
    assert not list((tmp_path / "store").rglob("*.hdf5"))


def test_a_truncated_file_at_the_source_is_not_believed(server: StaticServer, content: bytes) -> None:
    server.files[f"base/{dataset_named(KITCHEN).file}"] = content[: len(content) // 2]
    with pytest.raises(CorruptDataError, match="truncated file"):
        rbtool.download("d4rl", KITCHEN)


def test_mirrors_are_tried_in_order(server: StaticServer, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    file = dataset_named(KITCHEN).file
    server.files = {f"html/{file}": b"<html>", f"good/{file}": content}
    bases = [server.address("none"), server.address("html"), server.address("good")]
    monkeypatch.setenv("D4RL_URL", ", ".join(bases))
    result = rbtool.download("d4rl", KITCHEN)
    assert result.episodes == 3
    assert [asked.path.partition("/")[0] for asked in server.asked][-1] == "good"
    monkeypatch.setenv("D4RL_URL", " ".join(bases[:2]))
    with pytest.raises((DatasetNotFoundError, CorruptDataError)):
        rbtool.download("d4rl", KITCHEN, force=True)


@each(
    "value",
    [
        "ftp://x/y", "x.org", "https://", "https://x.org/a?b=c", "https://ok.org file:///etc",
        "https://someone:secret@x.org/data",
    ],
)  # fmt: skip
def test_a_base_url_of_another_form_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("D4RL_URL", value)
    with pytest.raises(UsageError, match="D4RL_URL has") as caught:
        rbtool.download("d4rl", KITCHEN)
    assert "secret" not in f"{caught.value}{caught.value.hint}"


@each(
    ("fault", "kind"),
    [
        (Fault(status=403), AuthorisationError), (Fault(status=404), DatasetNotFoundError),
        (Fault(reset=True), NetworkError),
    ],
)  # fmt: skip
def test_a_server_that_is_down_names_the_replacement(
    fault: Fault, kind: type[Exception], server: StaticServer, known_hopper: None
) -> None:
    for name, replacement in (
        (KITCHEN, "rbtool download minari kitchen-partial"),
        (HOPPER, "list --remote minari hopper"),
    ):
        server.faults[f"base/{dataset_named(name).file}"] = [fault]
        with pytest.raises(kind) as caught:
            rbtool.download("d4rl", name)
        assert replacement in caught.value.hint  # type: ignore[attr-defined]
        assert "D4RL_URL" in caught.value.hint  # type: ignore[attr-defined]


def test_the_replacements_of_minari() -> None:
    found = {dataset.id: dataset.replacement for dataset in published().values()}
    assert found["door-human-v1"] == "rbtool download minari door-human"
    assert found["antmaze-large-diverse-v2"] == "rbtool download minari antmaze-large-diverse"
    assert found["maze2d-umaze-dense-v1"] == "rbtool download minari pointmaze-umaze-dense"
    assert found["minigrid-fourrooms-random-v0"] == "rbtool download minari minigrid-fourrooms-random"
    assert found["bullet-ant-medium-v0"] == "rbtool list --remote minari ant"


def test_revisions_and_changes(server: StaticServer) -> None:
    with pytest.raises(UsageError, match="keeps no revisions"):
        rbtool.download("d4rl", KITCHEN, revision="main")
    file = f"base/{dataset_named(KITCHEN).file}"
    server.faults[file] = [Fault(headers={"ETag": '"one"'})]
    rbtool.download("d4rl", KITCHEN)
    assert rbtool.download("d4rl", KITCHEN, frozen=True).already_there
    server.faults[file] = [Fault(headers={"ETag": '"two"'})]
    with pytest.raises(CheckFailed):
        rbtool.download("d4rl", KITCHEN, frozen=True)


def test_the_cache_of_the_d4rl_package(content: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("D4RL_DATASET_DIR", str(cache))
    monkeypatch.setenv("RBTOOL_HOME", str(tmp_path / "store"))
    monkeypatch.setenv("RBTOOL_OFFLINE", "1")
    cache.mkdir()
    file = cache / dataset_named(KITCHEN).file_name
    file.write_bytes(content)
    result = rbtool.download("d4rl", KITCHEN, local=True)
    assert (result.episodes, result.fetched_from, result.request["origin"]) == (3, str(file), "local")
    assert rbtool.convert(file, tmp_path / "same").content_digest == result.content_digest
    assert list(D4rlSource.local_cache.ids(reader_class("d4rl"))) == [KITCHEN]
    with pytest.raises(DatasetNotFoundError, match="looked for hopper_medium-v2"):
        rbtool.download("d4rl", HOPPER, local=True)
    with pytest.raises(DatasetNotFoundError, match="among 179"):
        rbtool.download("d4rl", "hopper-v9", local=True)
    file.write_bytes(content[:5000])
    with pytest.raises(CorruptDataError, match="truncated file") as caught:
        rbtool.download("d4rl", KITCHEN, local=True, force=True)
    assert f"rbtool download d4rl {KITCHEN}" in caught.value.hint


def test_skip_bad_takes_a_dataset_of_the_cache(content: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("D4RL_DATASET_DIR", str(tmp_path))
    monkeypatch.setenv("RBTOOL_HOME", str(tmp_path / "store"))
    (tmp_path / dataset_named(KITCHEN).file_name).write_bytes(content)
    result = rbtool.download("d4rl", KITCHEN, local=True, skip_bad=True)
    assert (result.episodes, result.request["options"]) == (3, {"skip_bad": True})
    assert rbtool.download("d4rl", KITCHEN, local=True).path != result.path
