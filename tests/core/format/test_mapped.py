import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rbtool import CorruptDataError
from rbtool.core.format.digest import digest_bytes, digest_file
from rbtool.core.format.open_files import MappedWindow, OpenFiles, digest_mapped
from rbtool.core.ted.schema import Field

LEAF = Field(("a",), "uint16", (3,), "observation")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mapped") / "rows"
    path.write_bytes(b"!" + np.arange(30_000, dtype=np.uint16).tobytes())
    return path


@pytest.fixture(autouse=True, scope="module")
def small_parts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rbtool.core.format.open_files._PART", 8192)
        patch.setattr("rbtool.core.format.open_files._MAPPED", 8192)
        yield


@given(asked=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 10_000)), max_size=6))
@settings(deadline=None, max_examples=50)
def test_rows_are_those_of_the_file(file: Path, asked: list[tuple[int, int]]) -> None:
    whole, window, descriptor = (
        np.arange(30_000, dtype=np.uint16).reshape(-1, 3),
        MappedWindow(),
        os.open(file, os.O_RDONLY),
    )
    for start, stop in map(sorted, asked):
        found = window.rows((descriptor, 1), file, LEAF, start, stop)
        np.testing.assert_array_equal(found, whole[start:stop])
        assert not found.flags.writeable or not found.size
    window.close()
    os.close(descriptor)


def test_rows_beyond_the_end_are_refused(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    with pytest.raises(CorruptDataError, match="6 bytes too early"):
        MappedWindow().rows((descriptor, 1), file, LEAF, 9_000, 10_001)
    os.close(descriptor)


@pytest.mark.parametrize("start", [0, 1, 8192, 60_000, 60_001])
def test_digests_are_those_of_reading(file: Path, start: int) -> None:
    with open(file, "rb") as opened:
        assert digest_mapped(opened.fileno(), file, start) == digest_bytes(file.read_bytes()[start:])


@pytest.mark.parametrize("name", ["rows", "small"])
def test_open_files_are_digested_mapped_or_not(file: Path, name: str) -> None:
    file.with_name("small").write_bytes(b"abc")
    with OpenFiles(file.parent) as files:
        assert files.digest(name) == digest_file(file.with_name(name))
