"""Parts of tar archives: every member is in one of them, whatever the sizes, names and kinds of headers."""

from __future__ import annotations

import io
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rbtool.converters.openx import shards
from rbtool.core.errors import CorruptDataError

BLOCK = 512
MEMBERS = st.lists(st.tuples(st.sampled_from(["plain", "long"]), st.integers(0, 4000), st.booleans()), max_size=9)


def archive(members: list[tuple[str, int, bool]], kind: int = tarfile.GNU_FORMAT) -> bytes:
    """A tar archive of members with long names or not; some hold what looks like a header."""
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w", format=kind) as file:
        for number, (name, size, deceptive) in enumerate(members):
            info = tarfile.TarInfo(f"{'n' * 150 * (name == 'long')}_{number:05}.data.pickle")
            info.size = size
            lure = tarfile.TarInfo("lure_00000.data.pickle").tobuf() * deceptive
            file.addfile(info, io.BytesIO((lure + bytes([number + 1]) * size)[:size]))
    return held.getvalue()


def cut(data: bytes, folder: Path, span: tuple[int, int]) -> list[tuple[str, bytes]]:
    """The episodes of a part, with their bytes."""
    path = folder / "part.tar"
    path.unlink(missing_ok=True)

    def fetch(start: int, stop: int, write: Callable[[memoryview, int], None]) -> None:
        write(memoryview(data)[start:stop], start)

    if not shards.fetch_piece(fetch, len(data), span, path, "the archive"):
        assert not path.exists()
        return []
    with tarfile.open(path) as file:
        return [(one.name, file.extractfile(one).read()) for one in file if one.name != "before"]  # type: ignore[union-attr]


@settings(max_examples=60, deadline=None)
@given(MEMBERS, st.sampled_from([512, 1024, 2048, 5120]), st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
def test_parts_have_every_member_once(members: list[tuple[str, int, bool]], size: int, kind: int) -> None:
    members = [(name, count, False) for name, count, _ in members]
    data = archive(members, kind)
    with tempfile.TemporaryDirectory() as folder:
        found = [
            one
            for start in range(0, len(data), size)
            for one in cut(data, Path(folder), (start, min(start + size, len(data))))
        ]
    with tarfile.open(fileobj=io.BytesIO(data)) as file:
        assert found == [(one.name, file.extractfile(one).read()) for one in file]  # type: ignore[union-attr]


def test_a_header_inside_of_an_episode_is_none(tmp_path: Path) -> None:
    data = archive([("plain", 3000, True), ("plain", 100, False)])
    names = [name for start in range(0, len(data), 512) for name, _ in cut(data, tmp_path, (start, start + 512))]
    assert names == ["_00000.data.pickle", "_00001.data.pickle"]


@pytest.mark.parametrize("damage", ["header", "cut", "more"])
def test_damage_is_named(tmp_path: Path, damage: str) -> None:
    data = bytearray(archive([("plain", 1000, False)] * 4))
    if damage == "header":
        data[3 * BLOCK + 5] ^= 1
    elif damage == "cut":
        del data[4000:]
    else:
        data[-1] = 1
    with pytest.raises(CorruptDataError, match=r"the archive is (damaged|cut)"):
        cut(bytes(data), tmp_path, (0, len(data)))
