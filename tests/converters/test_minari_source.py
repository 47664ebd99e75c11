"""The Minari source against a hub and a bucket on loopback, in processes of their own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import ask, ask_one, failed
from hub import Fault, Hub, lay_out_bucket, lay_out_hub
from loopback import Gcs

from rbtool.converters.minari.reader import MinariReader
from rbtool.converters.minari.source import MinariSource
from rbtool.core.errors import UsageError
from rbtool.core.format.converter import RemoteDataset, RemoteFile
from rbtool.core.format.locate import source_class

DATA = Path(__file__).parents[1] / "data" / "minari"
DOOR = "D4RL/door/human-v2"
IDS = sorted(path.parent.parent.relative_to(DATA).as_posix() for path in DATA.rglob("data/metadata.json"))
ORGANISATION = Path("hub") / "farama-minari"
INDEX = "namespace_metadata.json"


def totals(dataset_id: str) -> tuple[int, int, int]:
    """Bytes, steps and episodes of a dataset, as the files here have them."""
    folder = DATA / dataset_id / "data"
    metadata = json.loads((folder / "metadata.json").read_bytes())
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return size, metadata["total_steps"], metadata["total_episodes"]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    root = lay_out_hub(DATA, tmp_path / "hub")
    shutil.copytree(DATA / DOOR, root / "farama-minari" / "flat-v0")
    with Hub(root, page_size=4) as served:
        yield served


@pytest.fixture
def environment(hub: Hub, tmp_path: Path) -> dict[str, str]:
    return hub.environment(tmp_path / "home")


@pytest.fixture
def gcs(tmp_path: Path) -> Iterator[Gcs]:
    with Gcs(lay_out_bucket(DATA, tmp_path / "gcs"), page_size=10) as served:
        yield served


def bucket_environment(gcs: Gcs) -> dict[str, str]:
    return {**gcs.environment(), "MINARI_REMOTE": "gcp://minari-remote"}


# Which remote ----------------------------------------------------------------------------------------


def test_making_a_source_and_its_names_ask_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINARI_REMOTE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9/")
    source = source_class("minari")()
    assert isinstance(source, MinariSource)
    assert source.remote == "hf://farama-minari"
    assert source.key.endswith("/farama-minari")


@pytest.mark.parametrize("remote", ["s3://bucket", "farama-minari", "hf://", "hf://a/b", "gcp://..", "hf://a b"])
def test_remotes_that_are_none(monkeypatch: pytest.MonkeyPatch, remote: str) -> None:
    monkeypatch.setenv("MINARI_REMOTE", remote)
    with pytest.raises(UsageError, match="MINARI_REMOTE") as raised:
        _ = MinariSource().remote
    assert remote in raised.value.message


def test_remotes_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = set()
    for remote in ("hf://one", "hf://two", "gcp://one"):
        monkeypatch.setenv("MINARI_REMOTE", remote)
        keys.add(MinariSource().key)
    assert len(keys) == 3


# Listing ---------------------------------------------------------------------------------------------


def test_ids_take_a_request_for_each_repository(hub: Hub, environment: dict[str, str]) -> None:
    found = ask_one(environment, "source", "ids")
    assert found == {"ids": sorted([*IDS, "flat-v0"]), "problems": [], "unreachable": False}
    assert len(hub.paths("^/api/")) == 2  # two pages
    assert sorted(hub.paths("/resolve/")) == [
        f"/datasets/{name}/resolve/main/{INDEX}" for name in sorted(hub.repositories)
    ]
    assert len(hub.requests) == 2 + len(hub.repositories)


def test_the_catalogue_and_what_it_need_not_ask_again(hub: Hub, environment: dict[str, str]) -> None:
    hub.page_size = 1000
    found = ask_one(environment, "source", "catalogue_twice")
    first = found["first"]
    assert [entry["id"] for entry in first["entries"]] == sorted([*IDS, "flat-v0"])
    for entry in first["entries"]:
        expected = totals(DOOR if entry["id"] == "flat-v0" else entry["id"])
        assert (entry["bytes"], entry["steps"], entry["episodes"]) == expected
    assert found["second"] == {**first, "fetched": found["second"]["fetched"]}
    assert found["heard"] == [[done, len(IDS) + 1] for done in range(len(IDS) + 2)]
    assert len(hub.paths("/tree/")) == 2 * len(hub.repositories)
    assert len(hub.paths("/data/metadata.json")) == len(IDS) + 1


Break = Callable[[Path], object]

BROKEN: dict[str, tuple[Break, str]] = {
    "no index": (lambda folder: (folder / INDEX).unlink(), "has no namespace_metadata.json"),
    "no JSON": (lambda folder: (folder / INDEX).write_text("{"), "is not JSON"),
    "deep JSON": (lambda folder: (folder / INDEX).write_text("[" * 100_000), "nests deeper than 100 levels"),
    "a list": (lambda folder: (folder / INDEX).write_text("[]"), "has no list of datasets"),
    "no lists": (lambda folder: (folder / INDEX).write_text("{}"), "has no list of datasets"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_repository_is_a_problem_among_many(
    hub: Hub, environment: dict[str, str], tmp_path: Path, how: str
) -> None:
    spoil, sentence = BROKEN[how]
    spoil(tmp_path / ORGANISATION / "pixel")
    hub.rescan()
    for found in ask(environment, "source", ["ids"], ["catalogue"]):
        assert [sentence in problem and "hf://farama-minari/pixel" in problem for problem in found["problems"]] == [
            True
        ]
        ids = found.get("ids") or [entry["id"] for entry in found["entries"]]
        assert ids == sorted([*(name for name in IDS if name != "pixel/random-v0"), "flat-v0"])


REFUSALS = [("status:401", 1), ("status:403", 1), ("status:500", 3), ("reset", 3), ("status:404", 1)]


@pytest.mark.parametrize(("kind", "requests"), REFUSALS)
def test_a_repository_that_refuses_is_a_problem_among_many(
    hub: Hub, environment: dict[str, str], kind: str, requests: int
) -> None:
    hub.faults = [Fault("/pixel/resolve/", kind, times=99)]
    found = ask_one(environment, "source", "ids")
    assert found["ids"] == sorted([*(name for name in IDS if name != "pixel/random-v0"), "flat-v0"])
    assert ["hf://farama-minari/pixel" in problem for problem in found["problems"]] == [True]
    assert len(hub.paths("/pixel/")) == requests


def test_names_in_an_index_that_can_be_no_datasets(hub: Hub, environment: dict[str, str], tmp_path: Path) -> None:
    strange = ["../x-v0", "/etc/x-v0", "pixel/../x-v0", "tuple/x-v0", "pixel/\x1b[2J-v0", 7, None, ["pixel/a-v0"]]
    index = {"datasets": [*strange, "pixel/random-v0", "pixel/random-v0"]}
    (tmp_path / ORGANISATION / "pixel" / INDEX).write_text(json.dumps(index))
    found = ask_one(environment, "source", "ids")
    assert found["ids"] == sorted([*IDS, "flat-v0"])
    assert all("cannot be a dataset" in problem and problem.isprintable() for problem in found["problems"])
    assert found["problems"]


def test_a_dataset_without_data_is_a_problem(hub: Hub, environment: dict[str, str], tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / ORGANISATION / "pixel" / "random-v0")
    hub.rescan()
    found = ask_one(environment, "source", "catalogue")
    assert found["problems"] == ["hf://farama-minari/pixel has no data of pixel/random-v0, which its index lists"]


def test_metadata_that_cannot_be_had_are_a_problem(hub: Hub, environment: dict[str, str]) -> None:
    hub.faults = [Fault("pixel/.*/data/metadata.json", "status:503", times=99)]
    found = ask_one(environment, "source", "catalogue")
    entry = next(entry for entry in found["entries"] if entry["id"] == "pixel/random-v0")
    assert (entry["bytes"], entry["steps"], entry["state"]) == (totals("pixel/random-v0")[0], None, None)
    assert ["pixel/random-v0" in problem for problem in found["problems"]] == [True]


@pytest.mark.parametrize(("match", "kind", "error"), [
    ("/api/datasets[?]", "status:503", "NetworkError"), ("/resolve/", "status:503", "NetworkError"),
    ("/resolve/", "status:403", "AuthorisationError"), ("/api/datasets[?]", "status:401", "AuthorisationError"),
])  # fmt: skip
def test_a_listing_that_says_nothing_fails(
    hub: Hub, environment: dict[str, str], match: str, kind: str, error: str
) -> None:
    hub.faults = [Fault(match, kind, times=999)]
    for outcome in ask(environment, "source", ["ids"], ["catalogue"]):
        failed(outcome, error)


def test_an_organisation_with_nothing_to_see(environment: dict[str, str]) -> None:
    found = ask_one({**environment, "MINARI_REMOTE": "hf://nobody"}, "source", "ids")
    assert "MINARI_REMOTE" in failed(found, "DatasetNotFoundError").hint


# One dataset -----------------------------------------------------------------------------------------


def test_describe_takes_three_requests(hub: Hub, environment: dict[str, str]) -> None:
    hub.page_size = 1000
    found = ask(environment, "source", *[["describe", name] for name in (*IDS, "flat-v0")])
    for dataset_id, outcome in zip((*IDS, "flat-v0"), found, strict=True):
        check_described(outcome, dataset_id, hub)
    assert len(hub.requests) == 3 * len(found)


def check_described(found: dict[str, Any], dataset_id: str, hub: Hub) -> None:
    """Compare with the files here that the hub was made from."""
    first, _, rest = dataset_id.partition("/")
    commit = hub.repositories[f"farama-minari/{first}"].commit
    original = DOOR if dataset_id == "flat-v0" else dataset_id
    assert (sum(file["size"] for file in found["files"]), found["steps"], found["episodes"]) == totals(original)
    assert {file["path"] for file in found["files"]} == {
        path.relative_to(DATA / original).as_posix() for path in (DATA / original / "data").rglob("*") if path.is_file()
    }
    assert found["address"] == f"hf://farama-minari/{first}@{commit}" + (f"/{rest}" if rest else "")
    assert (found["id"], found["revision"]) == (dataset_id, commit)


def test_describe_needs_no_index(hub: Hub, environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / ORGANISATION / "D4RL" / INDEX).unlink()
    hub.rescan()
    assert ask_one(environment, "source", "describe", DOOR)["episodes"] == 25


ABSENT = [
    "D4RL/door/human-v9", "D4RL", "D4RL/door", "nothing/here-v0", "flat-v1", "a b/c-v0", "D4RL/door/human-v2/data",
]  # fmt: skip


def test_datasets_that_are_not_there(environment: dict[str, str]) -> None:
    for outcome in ask(environment, "source", *[["describe", name] for name in ABSENT]):
        failed(outcome, "DatasetNotFoundError")


@pytest.mark.parametrize("name", ["../x", "/x", "a//b", ""])
def test_ids_that_leave_their_folder(name: str) -> None:
    with pytest.raises(UsageError):
        MinariSource().describe(name)


def test_a_revision_is_asked_for(hub: Hub, environment: dict[str, str]) -> None:
    repository = hub.repositories["farama-minari/D4RL"]
    repository.refs.add("v1")
    there, gone = ask(environment, "source", ["describe", DOOR, "v1"], ["describe", DOOR, "v2"])
    assert there["revision"] == repository.commit
    assert "revision v2" in failed(gone, "DatasetNotFoundError").message


@pytest.mark.parametrize("metadata", ["{", "[]", '{"total_steps": -1}', '{"total_steps": true, "total_episodes": "9"}'])
def test_metadata_that_make_no_sense(hub: Hub, environment: dict[str, str], tmp_path: Path, metadata: str) -> None:
    (tmp_path / ORGANISATION / DOOR / "data" / "metadata.json").write_text(metadata)
    hub.rescan()
    found = ask_one(environment, "source", "describe", DOOR)
    assert (found["steps"], found["episodes"]) == (None, None)


def test_changed_metadata_are_noticed_and_asked_for_again(hub: Hub, environment: dict[str, str]) -> None:
    hub.faults = [Fault("data/metadata.json", "corrupt")]
    assert ask_one(environment, "source", "describe", DOOR)["steps"] == 6704
    hub.faults = [Fault("data/metadata.json", "corrupt", times=9)]
    failed(ask_one(environment, "source", "describe", DOOR), "CorruptDataError")


def test_a_private_hub_and_its_token(hub: Hub, environment: dict[str, str]) -> None:
    hub.token = "hf_abcdefghijklmnop"
    calls = [["ids"], ["describe", DOOR]]
    for outcome in ask(environment, "source", *calls):
        assert "HF_TOKEN" in failed(outcome, "AuthorisationError").hint
    ids, found = ask({**environment, "HF_TOKEN": hub.token}, "source", *calls)
    assert (len(ids["ids"]), found["steps"]) == (len(IDS) + 1, 6704)


def test_a_gated_repository(hub: Hub, environment: dict[str, str]) -> None:
    hub.gated = {"farama-minari/D4RL"}
    ids, found = ask(environment, "source", ["ids"], ["describe", DOOR])
    assert len(ids["problems"]) == 1
    assert f"{hub.url}/datasets/farama-minari/D4RL" in failed(found, "AuthorisationError").hint


@pytest.mark.parametrize("variable", ["RBTOOL_OFFLINE", "HF_HUB_OFFLINE"])
def test_where_the_network_is_forbidden(hub: Hub, environment: dict[str, str], variable: str, tmp_path: Path) -> None:
    files = [{"path": "data/x", "size": 1, "checksum": "md5:" + "0" * 32, "addresses": [f"{hub.url}/x"]}]
    calls: list[list[Any]] = [["ids"], ["catalogue"], ["describe", DOOR], ["fetch_listed", files, str(tmp_path / "to")]]
    for outcome in ask({**environment, variable: "1"}, "source", *calls):
        assert variable in failed(outcome, "NetworkError").message
    assert hub.requests == []


# Bytes -----------------------------------------------------------------------------------------------


def test_the_files_are_those_of_the_remote(hub: Hub, environment: dict[str, str], tmp_path: Path) -> None:
    found = ask_one(environment, "source", "fetch_dataset", DOOR, str(tmp_path / "to"))
    assert found["heard"] == totals(DOOR)[0]
    for path in found["files"]:
        assert (tmp_path / "to" / path).read_bytes() == (DATA / DOOR / path).read_bytes()
    with MinariReader(tmp_path / "to") as reader:
        facts = reader.facts()
    assert (facts.steps, len(facts.episode_numbers)) == (6704, 25)


@pytest.mark.parametrize("dataset_id", ["cartpole/scripted-arrow-v0", "griddict/random-parquet-v0"])
def test_chosen_episodes_alone_are_fetched_and_can_be_read(
    environment: dict[str, str], tmp_path: Path, dataset_id: str
) -> None:
    found = ask_one(environment, "source", "fetch_dataset", dataset_id, str(tmp_path / "to"), "1:")
    assert "data/metadata.json" in found["files"]
    assert not [path for path in found["files"] if path.startswith("data/0/")]
    with MinariReader(tmp_path / "to") as part, MinariReader(DATA / dataset_id) as whole:
        some, same = part.facts([(1, None)]), whole.facts([(1, None)])
        assert (some.episode_numbers, some.steps) == (same.episode_numbers, same.steps)
        for one, other in zip(part.pieces(some.episode_numbers), whole.pieces(same.episode_numbers), strict=True):
            assert one.columns.keys() == other.columns.keys()
            assert all(np.array_equal(one.columns[key], other.columns[key]) for key in one.columns)


def listed(*paths: str) -> RemoteDataset:
    return RemoteDataset("a", "hf://a", None, tuple(RemoteFile(path, 1, "md5:" + "0" * 32, ("x",)) for path in paths))


def test_needed_files() -> None:
    source = MinariSource()
    folders = listed("data/metadata.json", *(f"data/{number}/part-0.arrow" for number in (0, 1, 2, 10)))
    one_file = listed("data/metadata.json", "data/main_data.hdf5")
    assert source.needed(folders, None) == folders.files
    assert source.needed(one_file, [(7, 8)]) == one_file.files
    assert [file.path for file in source.needed(folders, [(1, 3)])] == [
        "data/metadata.json", "data/1/part-0.arrow", "data/2/part-0.arrow",
    ]  # fmt: skip
    with pytest.raises(UsageError, match="episode 3"):
        source.needed(folders, [(3, 4)])


def test_a_remote_that_changed_since_it_was_described(hub: Hub, environment: dict[str, str], tmp_path: Path) -> None:
    described = ask_one(environment, "source", "describe", DOOR)
    (tmp_path / ORGANISATION / "D4RL" / "README.md").write_text("new")
    hub.rescan()
    failed(ask_one(environment, "source", "fetch_listed", described["files"], str(tmp_path / "to")), "StaleListing")


# A bucket --------------------------------------------------------------------------------------------


def test_a_bucket_is_listed_with_its_arrow_datasets(gcs: Gcs) -> None:
    ids, found = ask(bucket_environment(gcs), "source", ["ids"], ["catalogue_twice"])
    assert ids == {"ids": IDS, "problems": [], "unreachable": False}
    entries = found["first"]["entries"]
    assert [(entry["bytes"], entry["steps"], entry["episodes"]) for entry in entries] == [totals(name) for name in IDS]
    assert found["second"]["entries"] == entries
    assert len(gcs.paths("alt=media")) == len(IDS)


def test_a_dataset_of_a_bucket(gcs: Gcs, tmp_path: Path) -> None:
    found = ask_one(bucket_environment(gcs), "source", "fetch_dataset", DOOR, str(tmp_path / "to"))
    assert found["dataset"]["address"] == f"gcp://minari-remote/{DOOR}"
    assert (found["dataset"]["revision"], found["dataset"]["steps"], found["heard"]) == (None, 6704, totals(DOOR)[0])
    for path in found["files"]:
        assert (tmp_path / "to" / path).read_bytes() == (DATA / DOOR / path).read_bytes()


def test_what_a_bucket_does_not_have(gcs: Gcs) -> None:
    absent, revision = ask(bucket_environment(gcs), "source", ["describe", "D4RL/x-v0"], ["describe", DOOR, "main"])
    failed(absent, "DatasetNotFoundError")
    assert "keeps no history" in failed(revision, "UsageError").message
