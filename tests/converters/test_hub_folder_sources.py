"""The sources of robomimic and RoboSet against a hub on loopback: which ids there are, and what belongs to each."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import ask, ask_one, failed
from demonstration_files import DOOR, LIFT, ROBOMIMIC_IDS, ROBOSET_IDS, lay_out_folders
from hub import Fault, Hub

from rbtool.converters.robomimic.reader import ids_of
from rbtool.core.format.locate import source_class

ALL = [("robomimic", ROBOMIMIC_IDS), ("roboset", ROBOSET_IDS)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lay_out_folders(tmp_path_factory.mktemp("hub"))


@pytest.fixture
def hub(root: Path) -> Iterator[Hub]:
    with Hub(root, page_size=3) as served:
        yield served


@pytest.fixture
def environment(hub: Hub, tmp_path: Path) -> dict[str, str]:
    return hub.environment(tmp_path / "home")


@pytest.mark.parametrize(("name", "ids"), ALL)
def test_all_ids_with_their_sizes_from_one_listing(
    hub: Hub, environment: dict[str, str], name: str, ids: list[str]
) -> None:
    hub.page_size = 1000
    listed, found = ask(environment, f"source:{name}", ["ids"], ["catalogue_twice"])
    assert listed == {"ids": ids, "problems": [], "unreachable": False}
    assert [entry["id"] for entry in found["first"]["entries"]] == ids
    assert all(entry["bytes"] > 0 for entry in found["first"]["entries"])
    assert len(hub.requests) == 6


@pytest.mark.parametrize(("name", "ids"), ALL)
def test_every_id_is_described_with_its_own_files(
    hub: Hub, environment: dict[str, str], name: str, ids: list[str]
) -> None:
    seen: list[str] = []
    for dataset_id, found in zip(
        ids, ask(environment, f"source:{name}", *[["describe", one] for one in ids]), strict=True
    ):
        commit = next(one.commit for repository, one in hub.repositories.items() if name in repository.lower())
        assert (found["id"], found["revision"]) == (dataset_id, commit)
        assert all(file["checksum"] for file in found["files"])
        seen += [file["addresses"][0] for file in found["files"]]
    assert len(set(seen)) == len(seen)


def test_an_id_of_roboset_is_a_folder_and_not_the_start_of_names(environment: dict[str, str]) -> None:
    """Of `door_v2d-v1` and `door_v2d-v1b`, each has its own files."""
    one, other = ask(environment, "source:roboset", ["describe", DOOR], ["describe", f"{DOOR}b"])
    assert [file["path"] for file in one["files"]] == ["door_v2d-v1_seed0.h5", "door_v2d-v1_seed1.h5"]
    assert [file["path"] for file in other["files"]] == ["door_seed0.h5"]
    for absent in ("DAPG(expert)", "DAPG(expert)/door_v2d-v", "DAPG(expert)/door"):
        failed(ask_one(environment, "source:roboset", "describe", absent), "DatasetNotFoundError")


def test_parentheses_are_quoted_in_requests(hub: Hub, environment: dict[str, str], root: Path, tmp_path: Path) -> None:
    found = ask_one(environment, "source:roboset", "fetch_dataset", DOOR, str(tmp_path / "to"))
    assert hub.paths("/resolve/")
    assert all("DAPG%28expert%29" in path for path in hub.paths("/resolve/"))
    for name in found["files"]:
        expected = (root / "jdvakil/RoboSet_Sim" / DOOR / name).read_bytes()
        assert (tmp_path / "to" / name).read_bytes() == expected


def test_a_file_of_robomimic_comes_verified(hub: Hub, environment: dict[str, str], root: Path, tmp_path: Path) -> None:
    expected = (root / "robomimic/robomimic_datasets/v1.5/lift/ph/low_dim_v15.hdf5").read_bytes()
    hub.faults = [Fault("GET .*/resolve/", "corrupt")]
    found = ask_one(environment, "source:robomimic", "fetch_dataset", LIFT, str(tmp_path / "to"))
    assert found["dataset"]["files"][0]["checksum"] == f"sha256:{hashlib.sha256(expected).hexdigest()}"
    assert (tmp_path / "to" / "low_dim_v15.hdf5").read_bytes() == expected


def test_files_with_the_same_short_id_keep_their_version(environment: dict[str, str]) -> None:
    """Neither of two versions is taken for `can/ph/low_dim`."""
    short, one, other = ask(
        environment, "source:robomimic", *[["describe", f"can/ph/low_dim{end}"] for end in ("", "_v141", "_v15")]
    )
    failed(short, "DatasetNotFoundError")
    assert [one["files"][0]["path"], other["files"][0]["path"]] == ["low_dim_v141.hdf5", "low_dim_v15.hdf5"]


def test_ids_do_not_depend_on_the_order_of_the_listing() -> None:
    paths = [
        "v1.5/a/b_v15.hdf5", "v1.5/a/c_v15.hdf5", "v1.4/a/b_v15.hdf5", "a/b.hdf5", "a/b.h5", "d_v2.hdf5", "v1.5/e.hdf5",
    ]  # fmt: skip
    expected = {
        "v1.5/a/b_v15": "v1.5/a/b_v15.hdf5", "v1.4/a/b_v15": "v1.4/a/b_v15.hdf5", "a/c": "v1.5/a/c_v15.hdf5",
        "a/b.hdf5": "a/b.hdf5", "a/b.h5": "a/b.h5", "d": "d_v2.hdf5", "e": "v1.5/e.hdf5",
    }  # fmt: skip
    for seed in range(20):
        assert ids_of(random.Random(seed).sample(paths, len(paths))) == expected


@pytest.mark.parametrize("name", ["robomimic", "roboset"])
def test_making_a_source_asks_nobody(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9/")
    with source_class(name)() as source:
        assert source.remote.startswith("hf://")
        assert source.remote.removeprefix("hf://") in source.key
