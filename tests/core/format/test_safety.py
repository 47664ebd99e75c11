"""Names that would lead out of a folder, and text that looks like something else."""

from dataclasses import replace
from pathlib import Path

import pytest

from rbtool import CorruptDataError, FormatError
from rbtool.core.format.digest import FileRecord
from rbtool.core.format.episodes import episode_text_bytes, parse_episode_text
from rbtool.core.format.manifest import MANIFEST, Manifest, is_inside
from rbtool.core.format.memmap.builder import write_documents
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.testing.datasets import write_walks


@pytest.mark.parametrize("name", ["../up", "a/../../up", "/etc/passwd", "", ".", "a//b", "a/."])
def test_a_document_cannot_leave_its_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(FormatError, match="leads out"):
        write_documents(tmp_path / "root", {name: b"x"})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a", "a/b.json", "..a", ".rbtool/manifest.json", "a..b/c"])
def test_other_names_are_inside(name: str) -> None:
    assert is_inside(name)


def test_a_manifest_cannot_list_what_lies_outside(tmp_path: Path) -> None:
    manifest = write_walks(tmp_path / "walks", [(2, "open")])
    outside = FileRecord(".rbtool/source/../../../../etc/hostname", 1, "xxh3-128:0")
    (tmp_path / "walks" / MANIFEST).write_bytes(replace(manifest, files=(outside,)).to_bytes())
    with pytest.raises(FormatError, match="expected a path inside the folder"):
        Manifest.load(tmp_path / "walks")


def test_white_space_in_a_manifest_is_verified(tmp_path: Path) -> None:
    write_walks(tmp_path / "walks", [(2, "open")])
    path = tmp_path / "walks" / MANIFEST
    path.write_bytes(path.read_bytes().replace(b"\n ", b"\n\t", 1))
    with TedReader(tmp_path / "walks") as reader, pytest.raises(CorruptDataError, match=r"manifest\.json was changed"):
        reader.verify_files()


@pytest.mark.parametrize("text", ["a\u2028b", "a\x85b", "a\nb", "a\r\nb", "a\x1cb", "é", ""])
def test_any_text_of_an_episode_comes_back(text: str) -> None:
    rows = [{"task": text}, {}, {"task": "more", "a": text}]
    assert parse_episode_text(episode_text_bytes(rows), "here") == rows
