"""`download --local`: where it looks, where it stores datasets, and what it says if there are none."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest
from minari_oracle import assert_equals_minari

from rbtool.core.errors import DatasetNotFoundError, NetworkError, UsageError
from rbtool.core.format.manifest import Manifest
from rbtool.core.verbs.convert import convert
from rbtool.core.verbs.download import download

DATA = Path(__file__).parents[2] / "data" / "minari"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = shutil.copytree(DATA, tmp_path / "minari cache")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(folder))
    monkeypatch.setenv("RBTOOL_HOME", str(tmp_path / "home"))
    return Path(folder)


@pytest.mark.parametrize("name", ["D4RL/door/human-v2", "cartpole/scripted-v0", "cartpole/scripted-arrow-v0"])
def test_a_download_is_stored_under_its_id(name: str, cache: Path, tmp_path: Path) -> None:
    result = download("minari", name, local=True)
    assert (result.kind, result.path) == ("download", tmp_path / "home" / "minari" / name)
    assert (result.source, result.id, result.fetched_from) == ("minari", name, str(cache / name))
    assert (result.request["origin"], result.request["asked"]) == ("local", f"minari:{name}")
    assert assert_equals_minari(result.path, DATA / name) > 0


def test_a_download_equals_a_conversion(cache: Path, tmp_path: Path) -> None:
    one = download("minari", "tuple/trunc-v0", local=True, root=tmp_path / "root")
    assert one.path == tmp_path / "root" / "minari" / "tuple" / "trunc-v0"
    assert convert(DATA / "tuple" / "trunc-v0", tmp_path / "ted").content_digest == one.content_digest
    assert convert(DATA / "tuple" / "trunc-v0", one.path).already_there


def test_chosen_episodes_have_a_folder_of_their_own(cache: Path) -> None:
    whole = download("minari", "tuple/trunc-v0", local=True)
    part = download("minari", "tuple/trunc-v0", local=True, episodes="1:3")
    name, _, digits = part.path.name.partition("@")
    assert (name, len(digits), int(digits, 16) >= 0) == ("trunc-v0", 8, True)
    assert part.path.parent == whole.path.parent
    assert download("minari", "tuple/trunc-v0", local=True, episodes="2,1").already_there
    assert Manifest.load(part.path).request.episodes == "1:3"


def test_a_dry_run_and_an_equal_download_write_nothing(cache: Path, tmp_path: Path) -> None:
    result = download("minari", "tuple/trunc-v0", local=True, dry_run=True)
    assert (result.steps, result.dry_run) == (48, True)
    assert not (tmp_path / "home").exists()
    assert not download("minari", "tuple/trunc-v0", local=True).already_there
    assert download("minari", "tuple/trunc-v0", local=True).already_there
    assert not download("minari", "tuple/trunc-v0", local=True, force=True).already_there


def test_the_cache_of_minari_is_found_by_variable_or_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "no"))
    with pytest.raises(DatasetNotFoundError, match=f"{tmp_path}/no has no dataset"):
        download("minari", "a/b-v0", local=True)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.delenv("MINARI_DATASETS_PATH", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(DATA / "tuple", tmp_path / ".minari" / "datasets" / "tuple")
    assert download("minari", "tuple/trunc-v0", local=True, root=tmp_path / "root").steps == 48


def test_a_local_download_opens_no_socket(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **more: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert download("minari", "cartpole/single-episode-v0", local=True).episodes == 1


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("D4RL/door/human-v9", "there is D4RL/door/human-v2"),
        ("D4RL/door/human", "there is D4RL/door/human-v2"),
        ("cartpole/scriptd-v0", "cartpole/scripted-v0"),
        ("cartpole", "cartpole/"),
        ("xyzzy-v0", "MINARI_DATASETS_PATH names the folder, if it is another"),
    ],
)
def test_a_missing_dataset_names_the_folder_and_similar_ids(name: str, hint: str, cache: Path, tmp_path: Path) -> None:
    with pytest.raises(DatasetNotFoundError) as caught:
        download("minari", name, local=True)
    assert f"{cache} has no dataset {name!r}: looked in {cache / name}" in caught.value.message
    assert hint in caught.value.hint
    assert not (tmp_path / "home").exists()


def test_ids_that_could_leave_the_folder_are_refused(cache: Path, tmp_path: Path) -> None:
    for name in ("../x-v0", "a/../../x-v0", "/etc", "~/x", "a//b", ".", "a\\b", ".hidden/x"):
        with pytest.raises(UsageError, match="is not a dataset id"):
            download("minari", name, local=True)
    assert not (tmp_path / "home").exists()


def test_offline_downloads_name_local_datasets(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RBTOOL_OFFLINE", "1")
    for name, is_there in (("tuple/trunc-v0", True), ("trunc-tuple", True), ("tuple/other-v0", False)):
        with pytest.raises(NetworkError, match="RBTOOL_OFFLINE=1 forbids") as caught:
            download("minari", name)
        assert ("--local" in caught.value.hint) == is_there
        there = f"; {cache} has it: rbtool download minari tuple/trunc-v0 --local"
        assert caught.value.hint.endswith(there if is_there else "leave out --offline")
    with pytest.raises(UsageError, match="source 'arcade' is unknown"):
        download("arcade", "x", local=True)


def test_a_dataset_whose_metadata_has_another_id_is_noted(cache: Path) -> None:
    path = cache / "tuple" / "trunc-v0" / "data" / "metadata.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dataset_id": "other/name-v3"}))
    result = download("minari", "tuple/trunc-v0", local=True)
    assert result.notes == ("the dataset calls itself other/name-v3",)
    assert result.request["id"] == "tuple/trunc-v0"


@pytest.mark.parametrize(
    ("stored", "asked", "note"),
    [
        (["observation=zstd:3"], ["observation=lz4"], "already stored with --compress observation=zstd:3"),
        ([], ["observation=lz4"], "already stored without compression; --force converts it again"),
        (["observation=lz4"], ["observation=lz4"], None),
    ],
)
def test_a_stored_dataset_says_how_it_is_compressed(stored, asked, note, cache, monkeypatch) -> None:
    download("minari:cartpole/scripted-v0", local=True, layout="packed", compress=stored)
    monkeypatch.setenv("RBTOOL_OFFLINE", "1")
    again = download("minari:cartpole/scripted-v0", layout="packed", compress=asked)
    assert again.already_there
    told = [text for text in again.notes if "already stored" in text]
    assert [note in text for text in told] == ([] if note is None else [True])
    with pytest.raises(UsageError, match="field 'nope' not found"):
        download("minari:cartpole/scripted-v0", layout="packed", compress=["nope=lz4"])


@pytest.mark.parametrize("local", [False, True])
def test_an_unknown_compression_is_refused_before_the_dataset_is_looked_up(local: bool) -> None:
    for asked in ("observation", "observation=snap", "observation=zstd:99"):
        with pytest.raises(UsageError, match=f"--compress '{asked}'"):
            download("minari:not/there-v0", local=local, layout="packed", compress=[asked])
