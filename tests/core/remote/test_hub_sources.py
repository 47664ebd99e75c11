"""Sources of the folders of one hub repository: what a dataset is, and that no other one is ever taken for it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from asking import ask, ask_one, failed
from hub import Fault, Hub

FILES = {
    "kinds/small(red)/car/a_seed0.h5": b"one" * 10,
    "kinds/small(red)/car/a_seed1.h5": b"two" * 5_000,
    "kinds/small(red)/car/notes.txt": b"no data",
    "kinds/small(red)/car2/a.h5": b"three",
    "kinds/small(red)/car/inner/b.npz": b"four",
    "kinds/large/B.NPZ": b"five",
    "kinds/large/.hidden.npz": b"no data",
    "kinds/stray.h5": b"in no folder",
    "other/car/a.h5": b"elsewhere",
    "README.md": b"hello",
}
CAR = "small(red)/car"
IDS = ["large", CAR, "small(red)/car/inner", "small(red)/car2"]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    for name, content in FILES.items():
        path = tmp_path / "hub" / "acme" / "toys" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    with Hub(tmp_path / "hub", page_size=4) as served:
        yield served


@pytest.fixture
def environment(hub: Hub, tmp_path: Path) -> dict[str, str]:
    return hub.environment(tmp_path / "home")


def test_every_folder_of_data_files_is_a_dataset(hub: Hub, environment: dict[str, str]) -> None:
    ids, listed = ask(environment, "toys", ["ids"], ["catalogue_twice"])
    assert ids == {"ids": IDS, "problems": [], "unreachable": False}
    assert [(entry["id"], entry["bytes"]) for entry in listed["first"]["entries"]] == [
        ("large", 4), (CAR, 15_030), ("small(red)/car/inner", 4), ("small(red)/car2", 5)
    ]  # fmt: skip
    assert listed["heard"] == [[4, 4]]


def test_one_listing_of_the_files_makes_the_catalogue(hub: Hub, environment: dict[str, str]) -> None:
    hub.page_size = 1000
    ask_one(environment, "toys", "catalogue")
    assert len(hub.requests) == 2


def test_a_dataset_is_the_files_of_exactly_its_folder(hub: Hub, environment: dict[str, str]) -> None:
    found = ask_one(environment, "toys", "describe", CAR)
    commit = hub.repositories["acme/toys"].commit
    assert (found["id"], found["revision"]) == (CAR, commit)
    assert found["address"] == f"hf://acme/toys@{commit}/kinds/{CAR}"
    small, large = (FILES[f"kinds/{CAR}/a_seed{seed}.h5"] for seed in (0, 1))
    blob = hashlib.sha1(b"blob %d\0" % len(small) + small).hexdigest()
    assert [(file["path"], file["size"], file["checksum"]) for file in found["files"]] == [
        ("a_seed0.h5", len(small), f"git-sha1:{blob}"),
        ("a_seed1.h5", len(large), f"sha256:{hashlib.sha256(large).hexdigest()}"),
    ]
    assert not [path for path in hub.paths() if "(" in path], "parentheses are quoted"
    assert [path for path in hub.paths("/tree/") if unquote(path).partition("?")[0].endswith(f"/kinds/{CAR}")]


@pytest.mark.parametrize("name", ["small(red)", "small(red)/ca", "car", "stray", "other/car", "SMALL(RED)/car"])
def test_an_id_is_never_a_part_of_a_name_or_a_folder_of_folders(environment: dict[str, str], name: str) -> None:
    assert failed(ask_one(environment, "toys", "describe", name), "DatasetNotFoundError")


@pytest.mark.parametrize("name", ["../x", "/x", "a//b", "", "a/.git"])
def test_ids_that_leave_their_folder_are_refused(hub: Hub, environment: dict[str, str], name: str) -> None:
    failed(ask_one(environment, "toys", "describe", name), "UsageError")
    assert not hub.requests


def test_the_files_come_verified(hub: Hub, environment: dict[str, str], tmp_path: Path) -> None:
    hub.faults = [Fault("a_seed1", "corrupt")]
    found = ask_one(environment, "toys", "fetch_dataset", CAR, str(tmp_path / "to"))
    assert found["heard"] == 15_030
    assert (tmp_path / "to" / "a_seed1.h5").read_bytes() == FILES[f"kinds/{CAR}/a_seed1.h5"]
    hub.faults = [Fault("a_seed1", "corrupt", times=99)]
    failed(ask_one(environment, "toys", "fetch_dataset", CAR, str(tmp_path / "again")), "CorruptDataError")


def test_a_revision_is_a_commit(hub: Hub, environment: dict[str, str]) -> None:
    hub.repositories["acme/toys"].refs.add("v1")
    there, gone = ask(environment, "toys", ["describe", CAR, "v1"], ["describe", CAR, "v2"])
    assert there["revision"] == hub.repositories["acme/toys"].commit
    assert "revision v2" in failed(gone, "DatasetNotFoundError").message


@pytest.mark.parametrize(("kind", "error"), [
    ("status:500", "NetworkError"), ("status:403", "AuthorisationError"), ("reset", "NetworkError"),
])  # fmt: skip
def test_failures_are_what_they_mean(hub: Hub, environment: dict[str, str], kind: str, error: str) -> None:
    hub.faults = [Fault("/tree/", kind, times=99)]
    calls: list[list[Any]] = [["ids"], ["catalogue"], ["describe", CAR]]
    for outcome in ask(environment, "toys", *calls):
        failed(outcome, error)


@pytest.mark.parametrize("variable", ["RBTOOL_OFFLINE", "HF_HUB_OFFLINE"])
def test_where_the_network_is_forbidden(hub: Hub, environment: dict[str, str], variable: str) -> None:
    calls: list[list[Any]] = [["ids"], ["catalogue"], ["describe", CAR]]
    for outcome in ask({**environment, variable: "1"}, "toys", *calls):
        assert variable in failed(outcome, "NetworkError").message
    assert not hub.requests


def test_a_repository_without_data_has_no_datasets(hub: Hub, environment: dict[str, str], tmp_path: Path) -> None:
    for name in FILES:
        if name.startswith("kinds/"):
            (tmp_path / "hub" / "acme" / "toys" / name).unlink()
    hub.rescan()
    assert "no datasets" in failed(ask_one(environment, "toys", "ids"), "DatasetNotFoundError").message
