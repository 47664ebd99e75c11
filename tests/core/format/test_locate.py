import shlex
from pathlib import Path

import pytest
from cases import each
from damage import POINTER

from rbtool import DatasetNotFoundError, UsageError
from rbtool.core.declarations import source_example
from rbtool.core.errors import CorruptDataError
from rbtool.core.format.converter import safe_id
from rbtool.core.format.locate import (
    dataset_folder,
    find_dataset,
    open_source,
    source_names,
    storage_root,
    stored_datasets,
)
from rbtool.core.format.manifest import Request
from rbtool.core.testing.datasets import write_walks


@each("name", ["../x", "/etc", "a/../../b", "", "a//b", "a/", "~/x", "C:/x", "a\\b", ".hidden", "a/.b", "a\0"])
def test_ids_cannot_leave_their_folder(name: str) -> None:
    with pytest.raises(UsageError, match="is not a dataset id"):
        safe_id(name)


def test_roots_and_folders_of_requests_have_their_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RBTOOL_HOME", str(tmp_path / "env"))
    assert storage_root(tmp_path / "given") == tmp_path / "given"
    assert storage_root() == tmp_path / "env"
    monkeypatch.delenv("RBTOOL_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert storage_root() == tmp_path / "cache" / "rbtool"
    whole, part = Request("minari", "a/b-v0", "a/b-v0"), Request("minari", "a/b-v0", "a/b-v0", episodes="0:3")
    assert dataset_folder(whole, tmp_path) == tmp_path / "minari" / "a" / "b-v0"
    name = dataset_folder(part, tmp_path).name
    assert name.startswith("b-v0@")
    assert name.removeprefix("b-v0@") == part.identity().removeprefix("xxh3-128:")[:8]


def test_a_dataset_is_named_by_path_or_source_and_id(tmp_path: Path) -> None:
    folder = tmp_path / "minari" / "a" / "b-v0"
    folder.parent.mkdir(parents=True)
    write_walks(folder, [(3, "open")])
    assert find_dataset(folder) == folder
    assert find_dataset("minari:a/b-v0", tmp_path) == folder
    assert [path for path, _ in stored_datasets(tmp_path)] == [folder]


@pytest.mark.parametrize("name", ["minari:a/c-v0", "nowhere", "./nowhere", "minari:"])
def test_missing_datasets_are_not_found(name: str, tmp_path: Path) -> None:
    with pytest.raises(DatasetNotFoundError) as caught:
        find_dataset(name, tmp_path)
    assert caught.value.exit_code == 4
    assert caught.value.hint


def test_a_broken_dataset_is_listed_with_what_is_wrong(tmp_path: Path) -> None:
    write_walks(tmp_path / "minari" / "x", [(3, "open")])
    (tmp_path / "minari" / "x" / ".rbtool" / "manifest.json").write_text("{")
    [(path, problem)] = stored_datasets(tmp_path)
    assert path.name == "x"
    assert isinstance(problem, ValueError)


NEAR = "did you mean shelf:D4RL/door/human-v2, which is stored?"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("D4RL/door/human-v2", NEAR),
        ("shelf/D4RL/door/human-v2", NEAR),
        ("human-v2", NEAR),
        ("D4RL/dor/human-v2", NEAR),
        ("shelf:D4RL/door/human-v1", NEAR),
        ("human-v1", NEAR),
        ("shelf:D4RL/pen/human-v2", "fetch it with: rbtool download shelf D4RL/pen/human-v2"),
        ("shelf:atari/pong-v0", "fetch it with: rbtool download shelf atari/pong-v0"),
        ("arcade:pong", "there is no source 'arcade' here; known: {known}"),
        ("shlf:x", "there is no source 'shlf' here; did you mean 'shelf'? known: {known}"),
        ("shelf:D4RL/doors/human-v2", NEAR),
        ("crate:door-human-v1", "fetch it with: rbtool download crate door-human-v1"),
        ("./human-v2", f"name an existing path, or a dataset like {source_example()}:ID"),
        ("pong", f"name an existing path, or a dataset like {source_example()}:ID"),
    ],
)
@pytest.mark.usefixtures("two_sources")
def test_the_hint_names_the_nearest_dataset_or_how_to_fetch_it(name: str, hint: str, tmp_path: Path) -> None:
    for stored in ("shelf/D4RL/door/human-v2", "shelf/cartpole/demo-v0"):
        write_walks(tmp_path / stored, [(3, "open")])
    with pytest.raises(DatasetNotFoundError) as caught:
        find_dataset(name, tmp_path)
    assert caught.value.hint == hint.format(known=", ".join(source_names()))


PATTERNS = "patterns are for inspect and check, and, with --from table, for files of one table; name one dataset"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("walk", "did you mean walks?"),
        ("./wlaks", "did you mean walks?"),
        ("walks.h", "did you mean walks.h5?"),
        ("other.h5", f"name an existing path, or a dataset like {source_example()}:ID"),
        ("wal*", PATTERNS),
        ("no/walks", f"name an existing path, or a dataset like {source_example()}:ID"),
    ],
)
def test_the_nearest_name_of_the_folder_is_offered(name: str, hint: str, tmp_path: Path, monkeypatch) -> None:
    for there in ("walks", "walks.h5", "my notes"):
        (tmp_path / there).touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DatasetNotFoundError) as caught:
        find_dataset(name, tmp_path / "store")
    assert caught.value.hint == hint


@pytest.mark.parametrize("address", ["https://example.org/x", "s3://bucket/a b"])
def test_an_address_of_the_web_is_no_dataset(address: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"{address} is a URL, expected a path or a stored dataset") as caught:
        find_dataset(address, tmp_path)
    assert (caught.value.hint or "").startswith(f"rbtool inspect --streaming {shlex.quote(address)} reads one where")


@pytest.mark.usefixtures("homeless")
def test_a_path_needs_no_home(tmp_path: Path) -> None:
    write_walks(tmp_path / "walks", [(3, "open")])
    assert find_dataset(tmp_path / "walks") == tmp_path / "walks"
    with pytest.raises(DatasetNotFoundError, match="nowhere not found"):
        find_dataset("nowhere")


@pytest.mark.parametrize("inside", [False, True])
def test_a_pointer_of_git_lfs_is_named(tmp_path: Path, inside: bool) -> None:
    file = tmp_path / "folder" / "a_00000.tar"
    file.parent.mkdir()
    file.write_bytes(POINTER)
    with pytest.raises(CorruptDataError, match="is a git-lfs pointer") as caught:
        open_source(file.parent if inside else file)
    assert "git lfs pull" in caught.value.hint
