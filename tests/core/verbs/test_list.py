"""`list`: all stored datasets, sound or not, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import each

import rbtool
from rbtool.core.format.manifest import MANIFEST
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.results import to_document
from rbtool.core.testing.datasets import write_walks


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_walks(tmp_path / "minari" / "D4RL" / "door" / "human-v2", [(4, "open"), (3, "terminated")])
    write_walks(tmp_path / "minari" / "cart-v0", [(2, "open")])
    write_walks(tmp_path / "walks" / "a@12345678", [(5, "open")])
    return tmp_path


def _names(root: Path, pattern: str | None = None) -> list[str]:
    return [one.name for one in rbtool.list(pattern, root=root).datasets]


def test_list_describes_every_dataset(root: Path) -> None:
    found = rbtool.list(root=root)
    manifest = TedReader(root / "minari/D4RL/door/human-v2").manifest
    assert [one.name for one in found.datasets] == ["minari:D4RL/door/human-v2", "minari:cart-v0", "walks:a@12345678"]
    door = found.datasets[0]
    assert (door.steps, door.episodes, door.layout, door.bytes) == (7, 2, "ted", manifest.bytes)
    assert (door.content_digest, door.created) == (manifest.content_digest, manifest.provenance[-1].time)
    assert (door.path, door.problem) == (root / "minari/D4RL/door/human-v2", None)


@each(
    ("pattern", "found"),
    [
        ("door", ["minari:D4RL/door/human-v2"]), ("minari:*", ["minari:D4RL/door/human-v2", "minari:cart-v0"]),
        ("*-v[0-1]", ["minari:cart-v0"]), ("cart-v?", ["minari:cart-v0"]), ("cart", ["minari:cart-v0"]), ("art-v?", []),
        ("Door", ["minari:D4RL/door/human-v2"]),
        (None, ["minari:D4RL/door/human-v2", "minari:cart-v0", "walks:a@12345678"]),
    ],
)  # fmt: skip
def test_a_pattern_selects_datasets(root: Path, pattern: str | None, found: list[str]) -> None:
    assert _names(root, pattern) == found


def test_names_open_datasets_and_only_datasets_are_listed(root: Path) -> None:
    assert [rbtool.inspect(name, root=root).name for name in _names(root)] == _names(root)
    rbtool.checkpoint.save(root / "minari" / "cart-v0", root / "saved" / "cart", form="flat")
    write_walks(root / "minari" / ".cart-v0.rbtool-new-01234567", [(2, "open")])
    assert len(_names(root)) == 3


@each("damage", [b"{", b"[1]", b'{"format_version": 99}', b"\xff"])
def test_an_unreadable_dataset_is_listed_with_the_problem(root: Path, damage: bytes) -> None:
    (root / "minari" / "cart-v0" / MANIFEST).write_bytes(damage)
    broken = rbtool.list("cart", root=root).datasets[0]
    assert broken.name == "minari:cart-v0"
    assert broken.problem
    assert len(rbtool.list(root=root).datasets) == 3


def test_a_missing_root_is_empty_and_a_file_is_refused(tmp_path: Path) -> None:
    assert to_document(rbtool.list(root=tmp_path / "none")) == {
        "schema": 1, "kind": "list", "root": str(tmp_path / "none"), "datasets": [],
    }  # fmt: skip
    (tmp_path / "file").write_text("")
    with pytest.raises(rbtool.UsageError, match="not a folder"):
        rbtool.list(root=tmp_path / "file")
