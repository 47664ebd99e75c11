import signal
from pathlib import Path
from typing import Any

import pytest
from cases import each
from processes import run_forked

from rbtool import UsageError
from rbtool.core.format import fs
from rbtool.core.format.manifest import Manifest
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.format.staging import Staging, mend, remove_dataset
from rbtool.core.testing.datasets import write_walks

FIRST, SECOND = [(4, "truncated")], [(2, "terminated"), (3, "open")]


def _publish(dest: Path, episodes: list[Any], *, replace: bool = False) -> bool:
    with Staging(dest, replace=replace) as staging:
        write_walks(staging.path, episodes)
        return staging.publish()


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _steps(dest: Path) -> int:
    with TedReader(dest) as reader:
        reader.verify_files()
        return reader.manifest.steps


def test_a_result_appears_whole_in_place_of_nothing(tmp_path: Path) -> None:
    assert _publish(tmp_path / "deep" / "er" / "data", FIRST)
    assert _steps(tmp_path / "deep" / "er" / "data") == 4
    assert _names(tmp_path / "deep" / "er") == ["data"]
    (tmp_path / "data").mkdir()
    assert _publish(tmp_path / "data", FIRST)
    assert _steps(tmp_path / "data") == 4


def test_an_older_result_is_replaced_only_when_asked(tmp_path: Path) -> None:
    _publish(tmp_path / "data", FIRST)
    with pytest.raises(UsageError, match="already exists"):
        _publish(tmp_path / "data", SECOND)
    assert _steps(tmp_path / "data") == 4
    assert _publish(tmp_path / "data", SECOND, replace=True)
    assert _steps(tmp_path / "data") == 5
    assert _names(tmp_path) == ["data"]


@pytest.mark.parametrize("force", [False, True])
def test_other_files_are_never_replaced(tmp_path: Path, force: bool) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "thesis.tex").write_text("ten years")
    (tmp_path / "notes").write_text("one file")
    for name in ("data", "notes"):
        with pytest.raises(UsageError, match="left unchanged"):
            _publish(tmp_path / name, FIRST, replace=force)
    assert (tmp_path / "data" / "thesis.tex").read_text() == "ten years"
    assert _names(tmp_path) == ["data", "notes"]


def test_the_later_of_two_writers_learns_that_it_lost(tmp_path: Path) -> None:
    with Staging(tmp_path / "data") as slow:
        write_walks(slow.path, SECOND)
        assert _publish(tmp_path / "data", FIRST)
        assert not slow.publish()
    assert _steps(tmp_path / "data") == 4
    assert _names(tmp_path) == ["data"]


def test_one_file_is_published_and_replaced_like_a_folder(tmp_path: Path) -> None:
    for text, replace in ((b"old", False), (b"new", True)):
        if replace:  # only what begins like one of our files may be replaced
            (tmp_path / "one.h5").write_bytes(b'{\n "format_version": 1}')
        with Staging(tmp_path / "one.h5", replace=replace) as staging:
            fs.write_file(staging.path / "built", text)
            assert staging.publish("built")
        assert (tmp_path / "one.h5").read_bytes() == text
        assert _names(tmp_path) == ["one.h5"]


def test_a_file_replaces_a_folder_and_a_folder_a_file(tmp_path: Path) -> None:
    _publish(tmp_path / "data", FIRST)
    with Staging(tmp_path / "data", replace=True) as staging:
        fs.write_file(staging.path / "built", b'{\n "format_version": 1}')
        assert staging.publish("built")
    assert (tmp_path / "data").is_file()
    assert _publish(tmp_path / "data", SECOND, replace=True)
    assert _steps(tmp_path / "data") == 5
    assert _names(tmp_path) == ["data"]


def test_a_failure_removes_what_was_started(tmp_path: Path) -> None:
    def fail() -> None:
        with Staging(tmp_path / "data") as staging:
            write_walks(staging.path, FIRST)
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        fail()
    assert _names(tmp_path) == []


DIE = """
import os, signal, sys
from pathlib import Path
from rbtool.core.format.staging import Staging
staging = Staging(Path(sys.argv[1])).__enter__()
(staging.path / "rest").write_text("x")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_leftovers_are_removed_once_their_process_has_ended(tmp_path: Path) -> None:
    assert run_forked(DIE, tmp_path / "da[t]a").returncode == -signal.SIGKILL
    assert len(_names(tmp_path)) == 1
    with Staging(tmp_path / "da[t]a") as living:
        assert _names(tmp_path) == [living.path.name]
        assert _publish(tmp_path / "da[t]a", FIRST)
        assert living.path.is_dir()


def test_a_system_without_exchange_renames_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fs, "exchange", lambda one, other, **folders: False)
    _publish(tmp_path / "data", FIRST)
    assert _publish(tmp_path / "data", SECOND, replace=True)
    assert _steps(tmp_path / "data") == 5
    assert _names(tmp_path) == ["data"]


def test_a_swap_that_was_cut_between_its_renames_is_mended_on_opening(tmp_path: Path) -> None:
    _publish(tmp_path / "data", FIRST)
    (tmp_path / "data").rename(tmp_path / ".data.rbtool-old-0123abcd")
    assert TedReader(tmp_path / "data").manifest.steps == 4
    mend(tmp_path / "data")
    assert Manifest.load(tmp_path / "data").steps == 4


@each("broken", [False, True])
@each(
    "name",
    [
        "notes.txt", "mine/notes.memmap.txt", "sub/.rbtool/manifest.json", "notes.json", "mine.memmap",
        "next/mine.memmap", "mine/meta.json", "observation.shape.memmap", ".rbtool/mine.txt", ".rbtool/source/mine.txt",
        ".rbtool/episodes/mine.memmap",
    ],
)  # fmt: skip
def test_a_dataset_with_files_of_the_user_is_not_replaced(tmp_path: Path, name: str, broken: bool) -> None:
    data = tmp_path / "data"
    _publish(data, FIRST)
    (data / name).parent.mkdir(parents=True, exist_ok=True)
    (data / name).write_text("precious")
    if broken:
        (data / ".rbtool" / "manifest.json").write_text("{")
    with pytest.raises(UsageError, match=f"{name} is not part of the dataset around it") as caught:
        _publish(data, SECOND, replace=True)
    assert ("damaged" in caught.value.hint) is broken
    with pytest.raises(UsageError, match=f"{name} is not part of the dataset around it; nothing is removed"):
        remove_dataset(data)
    assert (data / name).read_text() == "precious"


def test_the_rest_of_a_damaged_manifest_lists_videos(tmp_path: Path) -> None:
    _publish(tmp_path / "data", FIRST)
    (tmp_path / "data" / ".rbtool" / "videos").mkdir()
    (tmp_path / "data" / ".rbtool" / "videos" / "0.mp4").write_text("frames")
    for left in ('{"files": [{"path": ".rbtool/videos/0.mp', '{"files": [{"path": ".rbtool/videos/0.mp4", "si'):
        (tmp_path / "data" / ".rbtool" / "manifest.json").write_text(left)
        if left.endswith(".mp"):
            with pytest.raises(UsageError, match=r"0\.mp4 is not part of the dataset"):
                _publish(tmp_path / "data", SECOND, replace=True)
        else:
            assert _publish(tmp_path / "data", SECOND, replace=True)


def test_nothing_is_published_inside_a_dataset(tmp_path: Path) -> None:
    _publish(tmp_path / "data", FIRST)
    with pytest.raises(UsageError, match="is inside the dataset"):
        _publish(tmp_path / "data" / "deep" / "sub", SECOND)
    for name in (".rbtool/manifest.json", "next/meta.json"):
        (tmp_path / "data" / name).write_text("{")
    with pytest.raises(UsageError, match="is not part of the dataset around it"):
        _publish(tmp_path / "data", SECOND, replace=True)


def test_a_damaged_dataset_can_be_replaced(tmp_path: Path) -> None:
    _publish(tmp_path / "data", FIRST)
    (tmp_path / "data" / "env_metadata.json").write_text("{}")
    (tmp_path / "data" / ".rbtool" / "manifest.json").write_text("{")
    (tmp_path / "data" / "observation.memmap").unlink()
    assert _publish(tmp_path / "data", SECOND, replace=True)
    assert _steps(tmp_path / "data") == 5


def test_files_that_appear_while_a_replacement_is_built_are_kept(tmp_path: Path) -> None:
    def publish() -> None:
        with Staging(tmp_path / "data", replace=True) as staging:
            write_walks(staging.path, FIRST)
            (tmp_path / "data").mkdir()
            (tmp_path / "data" / "thesis.tex").write_text("ten years")
            staging.publish()

    with pytest.raises(UsageError, match="left unchanged"):
        publish()
    assert _names(tmp_path / "data") == ["thesis.tex"]


@pytest.mark.parametrize("state", ["dangling", "empty", "older"])
def test_a_link_stands_for_where_it_leads(tmp_path: Path, state: str) -> None:
    if state == "empty":
        (tmp_path / "place").mkdir()
    elif state == "older":
        _publish(tmp_path / "place", FIRST)
    (tmp_path / "link").symlink_to(tmp_path / "place")
    assert _publish(tmp_path / "link", SECOND, replace=state == "older")
    assert (tmp_path / "link").is_symlink()
    assert _steps(tmp_path / "place") == _steps(tmp_path / "link") == 5


def test_a_system_without_rename_flags_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fs, "_rename_with", lambda *_: False)
    with Staging(tmp_path / "one.h5") as slow:
        fs.write_file(slow.path / "built", b"second")
        with Staging(tmp_path / "one.h5") as staging:
            fs.write_file(staging.path / "built", b"first")
            assert staging.publish("built")
        assert not slow.publish("built")
    assert (tmp_path / "one.h5").read_bytes() == b"first"


@each("replace", [False, True])
@each("name", ["file/data", "file/deep/data"])
def test_a_destination_below_a_file_is_refused(tmp_path: Path, name: str, replace: bool) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="file is a file, and the destination"):
        _publish(tmp_path / name, FIRST, replace=replace)
    with pytest.raises(UsageError, match="file is a file, and the destination"):
        Staging(tmp_path / name, replace=replace).refuse_if_taken()  # as a dry run does
    assert (tmp_path / "file").read_text() == "mine"
