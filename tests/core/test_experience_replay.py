"""Where the datasets of a source lie for those who name the folder themselves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rbtool.core.datasets.buffer import DatasetReplayBuffer
from rbtool.core.errors import UsageError
from rbtool.core.experience_replay import BaseDatasetExperienceReplay, SourceFolder
from rbtool.core.format.manifest import Manifest, has_manifest
from rbtool.core.testing.datasets import write_walks


def downloaded(store: Path, episodes: Any) -> Any:
    """A dataset in the hidden store, as a download leaves it."""
    write_walks(store / "minari" / "a" / "walk-v0", episodes)
    return SimpleNamespace(path=store / "minari" / "a" / "walk-v0", id="a/walk-v0")


@pytest.mark.parametrize(("root", "store"), [("minari", "."), ("other", "other/.rbtool-store")])
def test_downloads_go_to_a_hidden_store_in_folders_of_other_names(tmp_path: Path, root: str, store: str) -> None:
    place = SourceFolder.below("minari", tmp_path / root)
    assert (place.folder, place._store) == (tmp_path / root, tmp_path / store)


def test_a_folder_that_is_a_link_is_a_store_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "minari").symlink_to(tmp_path / "disk")
    assert SourceFolder.below("minari", tmp_path / "minari")._store == tmp_path / "minari" / ".rbtool-store"


def test_the_default_folder_is_below_the_storage_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RBTOOL_HOME", str(tmp_path))
    assert SourceFolder.below("minari", None).folder == tmp_path / "minari"


def test_a_download_is_moved_to_its_place(tmp_path: Path) -> None:
    place = SourceFolder.below("minari", tmp_path / "other")
    result = downloaded(place._store, [(3, "open")])
    assert place._placed(result, replace=False) == tmp_path / "other" / "a" / "walk-v0"
    assert not result.path.exists()
    assert place.find("a/walk-v0") == tmp_path / "other" / "a" / "walk-v0"
    again = downloaded(place._store, [(5, "open")])
    assert Manifest.load(place._placed(again, replace=True)).steps == 5
    assert [path.name for path in (tmp_path / "other" / "a").iterdir()] == ["walk-v0"]


@pytest.mark.parametrize("moved", [False, True])
def test_a_download_that_another_process_finished_first_is_used(tmp_path: Path, moved: bool) -> None:
    place = SourceFolder.below("minari", tmp_path / "other")
    there = place._placed(downloaded(place._store, [(3, "open")]), replace=False)
    late = SimpleNamespace(path=place._store / "minari" / "a" / "walk-v0", id="a/walk-v0")
    if not moved:
        downloaded(place._store, [(3, "open")])
    assert place._placed(late, replace=False) == there
    assert Manifest.load(there).steps == 3
    assert not late.path.exists()


def test_other_files_in_the_place_are_left_alone(tmp_path: Path) -> None:
    place = SourceFolder.below("minari", tmp_path / "other")
    result = downloaded(place._store, [(3, "open")])
    (place.folder / "a" / "walk-v0").mkdir(parents=True)
    (place.folder / "a" / "walk-v0" / "notes.txt").write_text("mine")
    for replace in (False, True):
        with pytest.raises(UsageError, match="left unchanged"):
            place._placed(result, replace=replace)
    assert has_manifest(result.path)


def test_a_link_in_the_place_of_the_hidden_store_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / ".rbtool-store").symlink_to(tmp_path / "other")
    folder = SourceFolder.below("minari", tmp_path / "root")
    for use in (folder.find, folder.fetch, folder.rebuild):
        with pytest.raises(UsageError, match=r"rbtool-store is a symbolic link"):
            use("cartpole/scripted-v0")
    assert not list((tmp_path / "other").iterdir())


def test_every_class_of_datasets_has_preprocess() -> None:
    assert BaseDatasetExperienceReplay.preprocess is DatasetReplayBuffer.preprocess
