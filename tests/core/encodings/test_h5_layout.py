"""What is in an H5 checkpoint, what of it is verified, and how much its chunks may unpack to."""

from __future__ import annotations

import json
import multiprocessing
import pickle
import subprocess
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from rbtool import CorruptDataError, FormatError, SchemaError, UsageError
from rbtool.core.encodings.compact import compare_steps
from rbtool.core.encodings.h5 import Compression, H5Reader, block_bytes, block_size, read_block, verify_block
from rbtool.core.encodings.hdf5_files import absurd_size, open_h5
from rbtool.core.encodings.save import load_checkpoint, save_checkpoint
from rbtool.core.format.contracts import Array
from rbtool.core.format.manifest import Manifest
from rbtool.core.format.memmap.builder import provenance_step
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.open_steps import open_steps
from rbtool.core.ted.schema import Key
from rbtool.core.testing.datasets import write_walks


def save(source: Path, target: Path, compression: str | None = None) -> Manifest:
    with open_steps(source) as reader:
        return save_checkpoint(reader, target, "h5", compression=Compression.parse(compression))


@pytest.fixture
def saved(odd: Path, tmp_path: Path) -> Path:
    save(odd, tmp_path / "saved.h5")
    return tmp_path / "saved.h5"


def test_leaves_text_and_documents_have_their_places(odd: Path, saved: Path) -> None:
    with h5py.File(saved) as h5, TedReader(odd) as dataset:
        assert h5["observation/position"].shape == (16 + 6, 3)
        np.testing.assert_array_equal(h5["reward"][:], dataset.read(("next", "reward"), 0, 16))
        np.testing.assert_array_equal(h5["mask"][:], dataset.read(("mask",), 0, 16))
        assert h5["info/solved"].dtype == bool
        assert h5["explicit_episodes"][:].tolist() == [1, 4]
        assert h5["episodes/length"][:].tolist() == [4, 3, 1, 1, 2, 5]
        assert h5["mask"].chunks is None
        lines = h5["episodes_text"][()].decode().split("\n")
        assert json.loads(lines[0]) == {"task": "wash \u2028 3 é"}
        assert h5["source/data%2Flicence.txt"][()].decode() == "© é"
        assert h5["source/raw.bin"][:].tolist() == [0, 255]
        assert h5["source/none"].shape == (0,)
        block = h5.userblock_size
    document = json.loads(saved.read_bytes()[:block])
    assert (document["kind"], document["layout"]) == ("checkpoint", "h5")
    assert document["files"][0]["size"] == saved.stat().st_size - block


def test_the_manifest_is_read_without_h5py(saved: Path) -> None:
    code = (
        "import sys; from rbtool.core.open_steps import open_steps; "
        f"print(open_steps({str(saved)!r}).manifest.steps, 'h5py' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["16", "False"]


def test_the_same_data_give_the_same_file_and_may_be_compressed(odd: Path, saved: Path, tmp_path: Path) -> None:
    again = save(odd, tmp_path / "again.h5")
    assert again.content_digest == H5Reader(saved).manifest.content_digest
    save(odd, tmp_path / "small.h5", "gzip")
    (tmp_path / "loaded").mkdir()
    with open_steps(tmp_path / "small.h5") as reader:
        assert load_checkpoint(reader, tmp_path / "loaded").content_digest == Manifest.load(odd).content_digest


@pytest.mark.parametrize(
    ("text", "method", "level"),
    [("gzip", "gzip", 4), ("gzip:1", "gzip", 1), ("gzip:9", "gzip", 9), ("lzf", "lzf", None)],
)
def test_compression(tmp_path: Path, text: str, method: str, level: int | None) -> None:
    dataset = write_walks(tmp_path / "walks", [(2000, "terminated"), (900, "truncated")])
    manifest = save(tmp_path / "walks", tmp_path / "small.h5", text)
    with h5py.File(tmp_path / "small.h5") as h5:
        assert (h5["reward"].compression, h5["reward"].compression_opts, h5["reward"].shuffle) == (method, level, True)
    assert manifest.bytes < save(tmp_path / "walks", tmp_path / "plain.h5").bytes
    (tmp_path / "loaded").mkdir()
    with open_steps(tmp_path / "small.h5") as reader:
        assert load_checkpoint(reader, tmp_path / "loaded").content_digest == dataset.content_digest


@pytest.mark.parametrize("text", ["none", "gzip", "lzf"])
@pytest.mark.parametrize("batch", [1, 30, 300])
def test_rows_are_written_in_batches(odd: Path, tmp_path: Path, monkeypatch, text: str, batch: int) -> None:
    monkeypatch.setattr("rbtool.core.encodings.output_files._BLOCK", batch)
    monkeypatch.setattr("rbtool.core.encodings.h5._CHUNK_BYTES", batch)
    monkeypatch.setattr("rbtool.core.encodings.compact.LEAF_BYTES", 300)
    save(odd, tmp_path / "saved.h5", text)
    with open_steps(odd) as dataset, open_steps(tmp_path / "saved.h5") as reader:
        assert compare_steps(dataset, reader) == []


def test_compression_has_one_name_and_others_are_refused() -> None:
    names = {None: "none", "none": "none", "gzip": "gzip:4", "lzf": "lzf"}
    assert {text: str(Compression.parse(text)) for text in names} == names
    for text in ("zstd", "gzip:0", "gzip:10", "lzf:3", "", "gzip:"):
        with pytest.raises(UsageError, match="compression"):
            Compression.parse(text)


def _virtual(h5: h5py.File) -> None:
    layout = h5py.VirtualLayout((16, 1), bool)
    layout[:] = h5py.VirtualSource("/etc/passwd", "mask", (16, 1))
    h5.create_virtual_dataset("mask", layout)


def _assigned(value: Any) -> Callable[[h5py.File], Any]:
    return lambda h5: h5.__setitem__("mask", value)


TRICKS: dict[str, Callable[[h5py.File], Any]] = {
    "soft link": _assigned(h5py.SoftLink("/info/solved")),
    "external link": _assigned(h5py.ExternalLink("/etc/passwd", "mask")),
    "external storage": lambda h5: h5.create_dataset("mask", (16, 1), bool, external=[("/etc/passwd", 0, 16)]),
    "virtual": _virtual,
    "references": lambda h5: h5.create_dataset("mask", (16, 1), h5py.ref_dtype),
    "group": lambda h5: h5.create_group("mask"),
    "shorter": _assigned(np.zeros((15, 1), bool)),
    "other type": _assigned(np.zeros((16, 1), np.int8)),
    "gone": lambda h5: None,
}
"""What takes the place of a dataset."""


@pytest.mark.parametrize("trick", TRICKS)
def test_only_plain_datasets_are_read(saved: Path, trick: str) -> None:
    reader = H5Reader(saved)
    with h5py.File(saved, "r+") as h5:
        del h5["mask"]
        TRICKS[trick](h5)
    with pytest.raises(CorruptDataError, match="mask"):
        reader.read(("mask",), 0, 16)
    with pytest.raises(CorruptDataError):
        reader.verify_files()


@pytest.mark.parametrize("block", [0, 512, 4096])
def test_hdf5_of_another_library_is_refused(tmp_path: Path, block: int) -> None:
    with h5py.File(tmp_path / "other.h5", "w", userblock_size=block) as h5:
        h5["observation"] = np.arange(3)
    with pytest.raises(FormatError, match="an HDF5 file not written by rbtool"):
        open_steps(tmp_path / "other.h5")


def test_a_file_that_was_cut_grew_or_lost_its_data_is_refused(saved: Path) -> None:
    data = saved.read_bytes()
    saved.write_bytes(data + b"\0")
    with pytest.raises(CorruptDataError, match="the manifest states"):
        H5Reader(saved)
    saved.write_bytes(data[:600])
    with pytest.raises(CorruptDataError, match="no HDF5 data follow"):
        open_steps(saved)
    block = data.index(b"\x89HDF")
    saved.write_bytes(data[: block + 8] + b"\xff" * (len(data) - block - 8))
    with open_steps(saved) as reader, pytest.raises(CorruptDataError, match="HDF5 cannot read"):
        reader.read(("action",), 0, 1)


def test_a_reader_goes_through_a_fork_and_a_pickle(odd: Path, saved: Path) -> None:
    reader, key = H5Reader(saved), ("observation", "position")
    expected = reader.read(key, 0, 16)
    in_child = multiprocessing.get_context("fork").Process(target=_compare, args=(reader, key, expected))
    in_child.start()
    in_child.join()
    assert in_child.exitcode == 0
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(reader)).read(key, 0, 16), expected)
    np.testing.assert_array_equal(reader.read(key, 0, 16), expected)


def _compare(reader: H5Reader, key: Key, expected: Array) -> None:
    np.testing.assert_array_equal(reader.read(key, 0, 16), expected)
    reader.close()


def with_chunk(path: Path, chunk: bytes, shape: int, **how: Any) -> Path:
    """Write a file with one compressed chunk of these stored bytes."""
    with h5py.File(path, "w") as h5:
        data = h5.create_dataset("x", (shape,), "u1", chunks=(shape,), **how)
        data.id.write_direct_chunk((0,), chunk)
    return path


def test_chunks_that_are_too_large_are_refused(tmp_path: Path) -> None:
    bomb = zlib.compress(np.random.default_rng(1).bytes(2 << 20) + bytes(4 << 20), 1)
    with pytest.raises(CorruptDataError, match="more than the 3,145,728 bytes of a chunk"):
        open_h5(with_chunk(tmp_path / "x.h5", bomb, 3 << 20, compression="gzip"))
    with pytest.raises(CorruptDataError, match=r"a chunk of 2,[\d,]+ stored bytes for 1,000"):
        open_h5(with_chunk(tmp_path / "y.h5", bomb, 1000, compression="gzip"))
    with pytest.raises(CorruptDataError, match="compressed in chunks of 1,073,741,824 bytes"):
        open_h5(with_chunk(tmp_path / "x.h5", b"x", 1 << 30, compression="gzip"))
    with h5py.File(tmp_path / "x.h5", "w") as h5:
        made = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        made.set_chunk((10,))
        made.set_deflate(4)
        made.set_deflate(4)
        h5py.h5d.create(h5.id, b"x", h5py.h5t.NATIVE_UINT8, h5py.h5s.create_simple((10,)), made)
    with pytest.raises(CorruptDataError, match="compressed by two methods"):
        open_h5(tmp_path / "x.h5")
    with h5py.File(tmp_path / "x.h5", "w") as h5:
        empty = h5.create_dataset("x", (1 << 40,), "u1", chunks=(1 << 20,))
        assert "states 1,099,511,627,776 bytes of data, but only 0 bytes" in absurd_size(empty.id)
        assert not absurd_size(h5.create_dataset("y", (1 << 20,), "u1", chunks=(1 << 10,)).id)


@pytest.mark.parametrize(
    ("libver", "chunks", "node"), [("earliest", 200, "TREE"), ("latest", 2000, "EADB"), ("latest", 2000, "EASB")]
)
def test_a_damaged_index_hides_no_chunk(libver: str, chunks: int, node: str, tmp_path: Path) -> None:
    """libhdf5 reads a chunk in front of the damage: more than its size then comes out of it."""
    with h5py.File(tmp_path / "whole.h5", "w", libver=libver) as h5:
        data = h5.create_dataset("x", (chunks << 16,), "u1", chunks=(1 << 16,), maxshape=(None,), compression="gzip")
        plain = zlib.compress(bytes(1 << 16))
        for number in range(1, chunks):
            data.id.write_direct_chunk((number << 16,), plain)
        data.id.write_direct_chunk((0,), zlib.compress(np.random.default_rng(1).bytes(2 << 20), 1))
    damaged = bytearray((tmp_path / "whole.h5").read_bytes())
    damaged[damaged.rfind(node.encode())] ^= 1
    (tmp_path / "x.h5").write_bytes(damaged)
    with pytest.raises(CorruptDataError, match=r"/x has (an unreadable index of chunks|a chunk of 2,\d+,)"):
        open_h5(tmp_path / "x.h5")


@pytest.mark.parametrize(
    "how",
    [{"compression": "gzip"}, {"compression": "lzf"}, {"compression": "gzip", "shuffle": True, "fletcher32": True}],
)
def test_usual_chunks_are_accepted(how: dict[str, Any], tmp_path: Path) -> None:
    noise = np.random.default_rng(1).integers(0, 256, 3 << 20, np.uint8)
    with h5py.File(tmp_path / "x.h5", "w") as h5:
        h5.create_dataset("x", data=noise, chunks=noise.shape, **how)
    open_h5(tmp_path / "x.h5").close()


SIGNATURE = b"\x89HDF\r\n\x1a\n"


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return write_walks(tmp_path / "walks", [(2, "open")])


def test_a_block_is_read_as_it_was_written(manifest: Manifest, tmp_path: Path) -> None:
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


def test_the_block_has_room_for_any_history(manifest: Manifest) -> None:
    size = block_size(manifest)
    assert size & (size - 1) == 0
    steps = [provenance_step("step", {"number": number, "path": "x" * 200}, {}) for number in range(10)]
    longer = replace(manifest, provenance=(*manifest.provenance, *steps))
    assert block_size(longer) == size
    block_bytes(longer, size)
    step = provenance_step("step", {"path": "x" * 100_000}, {})
    longer = replace(manifest, provenance=(*manifest.provenance, step))
    assert len(block_bytes(longer, block_size(longer))) == block_size(longer) == 1 << 17
    size = block_size(replace(manifest, steps=0, episodes=0))
    block_bytes(replace(manifest, steps=10**18, episodes=10**18), size)
    with pytest.raises(SchemaError, match="does not fit"):
        block_bytes(manifest, 512)
