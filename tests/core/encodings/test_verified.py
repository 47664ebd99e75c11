from pathlib import Path

import pytest

from rbtool import CorruptDataError
from rbtool.core.encodings.save import VerifyingReader
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.testing.datasets import write_walks


@pytest.fixture
def walks(tmp_path: Path) -> Path:
    write_walks(tmp_path / "walks", [(5, "terminated"), (4, "truncated")])
    return tmp_path / "walks"


def change(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


READS = {
    "never": [],
    "in order": [(0, 3), (3, 4), (4, 9)],
    "twice": [(0, 5), (0, 5), (5, 9)],
    "out of order": [(4, 9), (0, 4)],
    "the beginning only": [(0, 8)],
    "with a gap": [(0, 3), (4, 9)],
}


@pytest.mark.parametrize("parts", READS.values(), ids=READS)
def test_damage_is_found_however_the_rows_were_read(walks: Path, parts: list[tuple[int, int]]) -> None:
    path = walks / "next/observation.memmap"
    for at in (None, 0, path.stat().st_size - 1):
        if at is not None:
            change(path, at)
        with TedReader(walks) as source:
            reader = VerifyingReader(source)
            for part in parts:
                reader.read(("next", "observation"), *part)
            if at is None:
                reader.verify_files()
                continue
            with pytest.raises(CorruptDataError, match=r"observation\.memmap was changed"):
                reader.verify_files()
        change(path, at)


def test_what_was_read_counts_and_not_what_lies_there_now(walks: Path) -> None:
    with TedReader(walks) as source:
        change(walks / "action.memmap", 7)
        reader = VerifyingReader(source)
        reader.read(("action",), 0, 9)
        change(walks / "action.memmap", 7)
        with pytest.raises(CorruptDataError, match="changed"):
            reader.verify_files()


def test_a_file_that_goes_on_behind_its_rows_is_found(walks: Path) -> None:
    with TedReader(walks) as source:
        reader = VerifyingReader(source)
        reader.read(("action",), 0, 9)
        with open(walks / "action.memmap", "ab") as file:
            file.write(b"more")
        with pytest.raises(CorruptDataError, match="76 bytes, the manifest states 72"):
            reader.verify_files()
