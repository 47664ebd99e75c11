from dataclasses import replace
from pathlib import Path

import pytest

from rbtool import CorruptDataError, SchemaError
from rbtool.core.encodings.h5_layout import (
    block_bytes,
    block_size,
    read_block,
    verify_block,
)
from rbtool.core.format.manifest import Manifest, Provenance
from rbtool.core.format.ted.builder import provenance_step
from rbtool.core.testing.datasets import write_walks

SIGNATURE = b"\x89HDF\r\n\x1a\n"


def _with_step(manifest: Manifest, step: Provenance) -> Manifest:
    return replace(manifest, provenance=(*manifest.provenance, step))


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return write_walks(tmp_path / "walks", [(2, "open")])


def test_what_is_written_is_read(manifest: Manifest, tmp_path: Path) -> None:
    size = block_size(manifest)
    (tmp_path / "file").write_bytes(block_bytes(manifest, size) + SIGNATURE)
    found, found_size = read_block(tmp_path / "file")
    assert (found.to_bytes(), found_size) == (manifest.to_bytes(), size)
    verify_block(tmp_path / "file")


@pytest.mark.parametrize("old", [b"\n  ", b": ", b"  \x89HDF", b"}\n "])
def test_white_space_that_was_changed_is_found(manifest: Manifest, tmp_path: Path, old: bytes) -> None:
    data = block_bytes(manifest, block_size(manifest)) + SIGNATURE
    at = data.rindex(old) + 1
    (tmp_path / "file").write_bytes(data[:at] + b"\t" + data[at + 1 :])
    with pytest.raises(CorruptDataError, match="was changed"):
        verify_block(tmp_path / "file")


def test_the_size_is_that_of_the_data_and_not_of_their_history(manifest: Manifest) -> None:
    size = block_size(manifest)
    assert size & (size - 1) == 0
    longer = manifest
    for number in range(10):
        longer = _with_step(longer, provenance_step("step", {"number": number, "path": "x" * 200}, {}))
    assert block_size(longer) == size
    block_bytes(longer, size)


def test_any_history_fits(manifest: Manifest) -> None:
    longer = _with_step(manifest, provenance_step("step", {"path": "x" * 100_000}, {}))
    assert len(block_bytes(longer, block_size(longer))) == block_size(longer) == 1 << 17


def test_many_digits_fit(manifest: Manifest) -> None:
    size = block_size(replace(manifest, steps=0, episodes=0))
    block_bytes(replace(manifest, steps=10**18, episodes=10**18), size)


def test_a_block_that_is_too_small_is_refused(manifest: Manifest) -> None:
    with pytest.raises(SchemaError, match="does not fit"):
        block_bytes(manifest, 512)
