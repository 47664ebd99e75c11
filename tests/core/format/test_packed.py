"""Layout `packed`: gives what `ted` gives, goes back to the very same files, and notices damage."""

from __future__ import annotations

import contextlib
import json
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import zstandard
from cases import each
from hypothesis import given, settings

from rbtool import CorruptDataError
from rbtool.core.encodings.compact import compare_steps
from rbtool.core.encodings.save import save_checkpoint
from rbtool.core.errors import DatasetNotFoundError, FormatError, RbtoolError, SchemaError, UsageError
from rbtool.core.format.manifest import Manifest
from rbtool.core.format.memmap.builder import Origin
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.format.packed import builder
from rbtool.core.format.packed.builder import PackedBuilder, write_dataset
from rbtool.core.format.packed.reader import PackedReader
from rbtool.core.format.packed.recording import PackedRecorder
from rbtool.core.format.packed.schema import ChunkedRows, PackedSchema, RowCodec
from rbtool.core.open_steps import open_steps
from rbtool.core.ted.schema import Field
from rbtool.core.testing.datasets import ODD_LEAVES, DatasetPlan, dataset_plans, relist, write_plan

PLAN = DatasetPlan(
    lengths=(5, 1, 7, 3), endings=("terminated", "open", "truncated", "both"), jumps=(False, False, True, False),
    leaves=ODD_LEAVES, root_flags="set", text=True, documents=True,
)  # fmt: skip


def some_codecs(reader: TedReader) -> dict[tuple[str, ...], RowCodec]:
    """Compress every third stored field, in turns."""
    stored = [one.field for one in PackedSchema.of(reader.fields).fields if one.field.row_bytes]
    return {field.key: RowCodec.parse(("zstd:1", "lz4")[n % 2]) for n, field in enumerate(stored) if n % 3 == 0}


def pack(ted: Path, packed: Path, *, compressed: bool = True) -> Manifest:
    with TedReader(ted) as reader:
        origin = Origin.of(reader.manifest, reader.documents())
        return write_dataset(reader, packed, "packed", origin, some_codecs(reader) if compressed else None)


@contextlib.contextmanager
def small_steps(buffer: int, chunk: int) -> Iterator[None]:
    """Write in so small parts that episodes, and what is compressed together, are cut anywhere."""
    before = builder._BUFFER_BYTES, builder._CHUNK_BYTES
    builder._BUFFER_BYTES, builder._CHUNK_BYTES = buffer, chunk
    try:
        yield
    finally:
        builder._BUFFER_BYTES, builder._CHUNK_BYTES = before


@settings(max_examples=25, deadline=None)
@given(dataset_plans())
def test_every_row_is_that_of_ted_and_goes_back_to_it(plan: DatasetPlan) -> None:
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        ted = write_plan(plan, work / "ted")
        with small_steps((4 << 20, 300, 1)[plan.seed % 3], (4 << 20, 700)[plan.seed % 2]):
            packed = pack(work / "ted", work / "packed")
        with TedReader(work / "ted") as one, PackedReader(work / "packed") as other:
            other.verify_files()
            assert compare_steps(one, other) == []
            assert other.episode_text == one.episode_text
            assert other.documents() == one.documents()
            assert packed.ranges == ted.ranges
            assert other.ted_digest == ted.content_digest
            back = write_dataset(other, work / "back", "ted", Origin.of(packed, other.documents()))
        assert back.content_digest == ted.content_digest
        own = {name: back.to_dict()[name] for name in ("request", "manifest_digest")}
        assert back.to_dict() == ted.to_dict() | own


@pytest.mark.parametrize("buffer", [1, 200, 4 << 20])
def test_any_part_of_any_leaf_can_be_read(tmp_path: Path, buffer: int) -> None:
    write_plan(PLAN, tmp_path / "ted")
    with small_steps(buffer, 500):
        pack(tmp_path / "ted", tmp_path / "packed")
    with TedReader(tmp_path / "ted") as one, PackedReader(tmp_path / "packed") as other:
        for field in one.fields:
            for start in range(17):
                for stop in range(start, 17):
                    expected, found = (reader.read(field.key, start, stop) for reader in (one, other))
                    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
                    assert found.tobytes() == expected.tobytes()
                    assert found.flags.writeable


def test_records_are_as_the_format_says(tmp_path: Path) -> None:
    write_plan(PLAN, tmp_path / "ted")
    manifest = pack(tmp_path / "ted", tmp_path / "packed", compressed=False)
    schema = json.loads((tmp_path / "packed" / "schema.json").read_text())
    size = schema["record_bytes"]
    assert size % 8 == 0
    assert (tmp_path / "packed" / "records.bin").stat().st_size == size * (16 + 4)
    assert (tmp_path / "packed" / "explicit_next.bin").stat().st_size == size * 7
    assert not (tmp_path / "packed" / "meta.json").exists()
    assert (manifest.layout, manifest.boundary.explicit_next) == ("packed", 1)
    entry = next(one for one in schema["fields"] if one["key"] == ["action"])
    records = np.fromfile(tmp_path / "packed" / "records.bin", np.uint8).reshape(20, size)
    actions = records[:, entry["offset"] : entry["offset"] + 8].copy().view(np.float32)
    with TedReader(tmp_path / "ted") as reader:
        assert actions[:5].tobytes() == reader.read(("action",), 0, 5).tobytes()
        assert not actions[5].any()  # the step fields of the last record of an episode
        assert actions[6].tobytes() == reader.read(("action",), 5, 6).tobytes()


def test_big_fields_have_their_own_files() -> None:
    leaves = [
        Field(("observation", "image"), "uint8", (64, 64), "observation"),
        Field(("next", "observation", "image"), "uint8", (64, 64), "observation"),
        Field(("action",), "float32", (1023,), "action"),
    ]
    schema = PackedSchema.of(leaves)
    assert [one.field.name for one in schema.own_files] == ["observation.image"]
    assert schema.own_files[0].file() == "fields/observation/image.bin"
    assert schema.record_bytes == 4096


@pytest.mark.parametrize(
    ("lengths", "match"), [([3], "names 2 episodes, not the 1"), ([3, 2], "last episode has 2 steps and no end")]
)
def test_episodes_must_be_those_that_were_written(tmp_path: Path, lengths: list[int], match: str) -> None:
    write_plan(DatasetPlan((3, 2), ("open", "open"), (False, False), ()), tmp_path / "ted")
    with TedReader(tmp_path / "ted") as reader, PackedBuilder(tmp_path / "packed", reader.fields) as builder:
        steps = sum(lengths)
        columns = {field.key: reader.read(field.key, 0, steps) for field in reader.fields}
        builder.append(columns, np.arange(steps) == 2)
        with pytest.raises(SchemaError, match=match):
            builder.finish(reader.episodes, Origin.of(reader.manifest, {}))
    assert not (tmp_path / "packed" / ".rbtool" / "manifest.json").exists()


# Damage ----------------------------------------------------------------------------------------------


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    write_plan(PLAN, tmp_path / "ted")
    pack(tmp_path / "ted", tmp_path / "packed")
    return tmp_path / "packed"


def test_one_changed_byte_anywhere_is_found(packed: Path) -> None:
    files = [path for path in sorted(packed.rglob("*")) if path.is_file() and path.stat().st_size]
    assert len(files) > 20
    for number, path in enumerate(files):
        data = bytearray(path.read_bytes())
        data[number * 7919 % len(data)] ^= 0x10
        path.write_bytes(data)
        with pytest.raises(RbtoolError), open_steps(packed) as reader:  # found on opening, or
            reader.verify_files()
        data[number * 7919 % len(data)] ^= 0x10
        path.write_bytes(data)


def test_every_cut_is_found_on_opening(packed: Path) -> None:
    own = [path for path in (packed / "fields").rglob("*") if path.is_file()]
    names = ["records.bin", "explicit_next.bin", *(str(path.relative_to(packed)) for path in own)]
    for name in names:
        whole = (packed / name).read_bytes()
        (packed / name).write_bytes(whole[:-1])
        with pytest.raises(CorruptDataError):
            PackedReader(packed)
        (packed / name).unlink()
        with pytest.raises(CorruptDataError, match="is missing"):
            PackedReader(packed)
        (packed / name).write_bytes(whole)


def edit_schema(folder: Path, edit: Callable[[dict[str, object]], None]) -> None:
    document = json.loads((folder / "schema.json").read_text())
    edit(document)
    (folder / "schema.json").write_text(json.dumps(document, indent=1) + "\n")


@pytest.mark.parametrize(
    ("edit", "error", "match"),
    [
        (lambda document: document["fields"].reverse(), CorruptDataError, "changed or swapped"),
        (lambda document: document.update(record_bytes=8), CorruptDataError, "changed or swapped"),
        (lambda document: document["fields"][0].update(codec="brotli:9"), FormatError, "the codec 'brotli:9' is"),
        (lambda document: document["fields"][0].update(codec="zstd:99"), FormatError, "levels 1 to 22"),
        (lambda document: document.update(version=2), FormatError, "reads up to 1"),
        (lambda document: document.update(format="parquet"), FormatError, "its format is 'parquet'"),
        (lambda document: document.pop("fields"), FormatError, "expected an object with fields"),
    ],
)
def test_an_edited_schema_is_refused(packed, edit, error, match) -> None:
    edit_schema(packed, edit)
    relist(packed)
    with pytest.raises(error, match=match):
        PackedReader(packed)


def test_swapped_files_are_found(packed: Path) -> None:
    one = next((packed / "fields").rglob("*.zstd"))
    other = packed / "records.bin"
    held = one.read_bytes()
    shutil.copy(other, one)
    other.write_bytes(held)
    with pytest.raises(CorruptDataError):
        PackedReader(packed)


def test_other_paths_are_refused_by_what_they_are(tmp_path: Path) -> None:
    write_plan(PLAN, tmp_path / "ted")
    with TedReader(tmp_path / "ted") as reader:
        save_checkpoint(reader, tmp_path / "c.h5", "h5")
        PackedRecorder(tmp_path / "recording", reader.fields).close()
    (tmp_path / "words.txt").write_text("words")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "records.bin").write_bytes(b"abc")
    for name, kind, words, hint in (
        ("c.h5", FormatError, "is a checkpoint in one file", f"load {tmp_path / 'c.h5'} DEST --layout packed"),
        ("words.txt", FormatError, "is a file, expected the folder of a dataset", ""),
        ("recording", CorruptDataError, "is a recording that was not finished", "rbtool repair"),
        ("ted", FormatError, "has layout ted, expected packed", f"convert {tmp_path / 'ted'} DEST --layout packed"),
        ("plain", FormatError, r"plain is not a dataset: it has no .rbtool/manifest.json", ""),
        ("nothing", DatasetNotFoundError, "not found", ""),
    ):
        with pytest.raises(kind, match=words) as caught:
            PackedReader(tmp_path / name)
        assert hint in caught.value.hint, name


def test_fields_that_cannot_be_compressed_are_refused() -> None:
    for key, match in ((("next", "x"), "is stored with 'x'"), (("nothing",), "nothing that could be compressed")):
        with pytest.raises(UsageError, match=match):
            PackedSchema.of(PLAN.fields(), {key: RowCodec.parse("zstd")})


# Compressed chunks take no more memory than the rows that they stand for.

ROWS = b"rows" * 4


def _bomb(size: int, *, stated: bool = True) -> bytes:
    """A frame of `size` zeros, made piece by piece."""
    made = zstandard.ZstdCompressor().compressobj(size=size if stated else -1)
    return b"".join([*(made.compress(bytes(1 << 20)) for _ in range(size >> 20)), made.flush()])


def _unpack(*chunks: bytes, codec: str = "zstd") -> bytes:
    sizes = [len(ROWS)] * len(chunks)
    return bytes(RowCodec.parse(codec).decompress([memoryview(chunk) for chunk in chunks], sizes, "x.chunks"))


@pytest.mark.parametrize("stated", [True, False])
@pytest.mark.parametrize("others", [0, 1])
def test_a_frame_is_held_to_the_size_of_its_rows(stated: bool, others: int) -> None:
    bomb, sound = _bomb(256 << 20, stated=stated), zstandard.ZstdCompressor().compress(ROWS)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CorruptDataError, match="not zstd data"):
        _unpack(*[sound] * others, bomb)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_frames_of_another_size_or_with_bytes_behind_are_not_opened() -> None:
    sound = zstandard.ZstdCompressor().compress(ROWS)
    for stated in (2 << 30, 15, 0):
        header = bytes([0b1110_0000]) + stated.to_bytes(8, "little")  # one segment, size in eight bytes
        with pytest.raises(CorruptDataError, match=f"a frame states {stated:,} bytes, expected 16"):
            _unpack(sound[:4] + header + sound[6:])
    with pytest.raises(CorruptDataError, match="not zstd data"):
        _unpack(sound + b"more")
    for codec in ("zstd", "lz4"):
        with pytest.raises(CorruptDataError, match="cannot hold the 1,099,511,627,776 expected"):
            RowCodec.parse(codec).decompress([memoryview(b"small")], [1 << 40], "x.chunks")


@each("codec", ["zstd", "lz4"])
@each("count", [1, 3])
def test_sound_chunks_are_read(codec: str, count: int) -> None:
    assert _unpack(*[RowCodec.parse(codec).compressor()(memoryview(ROWS))] * count, codec=codec) == ROWS * count


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_files_of_one_codec_are_written_by_several_threads(tmp_path: Path, codec: str) -> None:
    """The parts of a split are; a compressor that two threads use at a time writes damaged chunks, or crashes."""
    shared = RowCodec.parse(codec)

    def write_and_read(number: int) -> bool:
        rows = np.random.default_rng(number).integers(0, 8, (1 << 17, 32), np.uint8)
        store = ChunkedRows(tmp_path / str(number), "rows", "index", 32, shared, 512)
        for start in range(0, len(rows), 1 << 13):
            store.append(rows[start : start + (1 << 13)])
        store.flush()
        same = np.array_equal(store.read(0, len(rows)), rows)
        store.close()
        return same

    with ThreadPoolExecutor(3) as threads:
        assert all(threads.map(write_and_read, range(6)))
