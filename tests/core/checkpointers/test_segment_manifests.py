"""The list of segments of a checkpoint: what is no such list, of another version or damaged, is refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rbtool.core.buffers.base import ReplayBuffer
from rbtool.core.checkpointers import segments
from rbtool.core.checkpointers.segments import Segment, SegmentFolder, SegmentManifest
from rbtool.core.errors import CorruptDataError, FormatError, RbtoolError, SchemaError
from rbtool.core.format.documents import document_digest
from rbtool.core.storages.lazy_tensor import LazyTensorStorage

ROWS = 64


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have segments of a few rows."""
    monkeypatch.setattr(segments, "_FEWEST_BYTES", 128)


def full() -> LazyTensorStorage:
    storage = LazyTensorStorage(ROWS)
    storage.set(range(ROWS), torch.arange(ROWS))
    return storage


def test_what_torchrl_writes_over_it_is_not_taken_for_ours(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    full().dumps(path)
    (path / "storage_metadata.json").write_text('{"metadata": {}, "is_pytree": false, "len": 3}')
    with pytest.raises(CorruptDataError, match=r"storage_metadata\.json was not saved with the rest"):
        LazyTensorStorage(ROWS).loads(path)


@pytest.mark.parametrize(("before", "after"), [('"length": 64', '"length": 63'), ('"ndim": 1', '"ndim": 2')])
def test_a_changed_list_of_segments(tmp_path: Path, before: str, after: str) -> None:
    path = tmp_path / "saved"
    full().dumps(path)
    text = (path / "segments.json").read_text()
    assert before in text or before.replace(" ", "") in text
    (path / "segments.json").write_text(
        text.replace(before, after).replace(before.replace(" ", ""), after.replace(" ", ""))
    )
    for _ in range(2):
        with pytest.raises(CorruptDataError):
            LazyTensorStorage(ROWS).loads(path)
        shutil.rmtree(path / ".rbtool", ignore_errors=True)


def test_a_newer_form_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    full().dumps(path)
    shutil.rmtree(path / ".rbtool")
    (path / "segments.json").write_text('{"format_version": 99}')
    with pytest.raises(FormatError, match="format version 99"):
        LazyTensorStorage(ROWS).loads(path)


@pytest.mark.parametrize("target", ["aside", "nowhere"])
@pytest.mark.parametrize("name", ["segments.json", "segment-00000.memmap"])
def test_a_symbolic_link_in_the_place_of_a_file(tmp_path: Path, name: str, target: str) -> None:
    path = tmp_path / "saved"
    full().dumps(path)
    (path / name).rename(tmp_path / "aside")
    (path / name).symlink_to(tmp_path / target)
    storage = full()
    with pytest.raises(RbtoolError) as caught:
        storage.loads(path)
    if (name, target) != ("segments.json", "nowhere"):  # without its list, it is none of these checkpoints
        assert isinstance(caught.value, CorruptDataError)
        assert str(caught.value).startswith(f"{path / name} is a symbolic link, expected a regular file")
    assert len(storage) == ROWS


def test_an_error_of_the_disk_names_the_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full().dumps(tmp_path / "saved")

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(segments, "digest_descriptor", fail)
    with pytest.raises(OSError, match=r"saved/segment-0000\d\.memmap") as caught:
        LazyTensorStorage(ROWS).loads(tmp_path / "saved")
    assert caught.value.errno == errno.EIO


def test_other_dimensions_are_refused(tmp_path: Path) -> None:
    full().dumps(tmp_path / "saved")
    with pytest.raises(SchemaError, match="saved with ndim=1, this storage has ndim=2"):
        LazyTensorStorage(ROWS, ndim=2).loads(tmp_path / "saved")


def gap(found: SegmentManifest) -> SegmentManifest:
    return replace(found, segments=found.segments[1:])


def disordered(found: SegmentManifest) -> SegmentManifest:
    return replace(found, segments=found.segments[::-1])


def overlap(found: SegmentManifest) -> SegmentManifest:
    first, *others = found.segments
    start, stop = first.runs[0]
    return replace(found, segments=(replace(first, runs=((start, stop), (stop - 1, stop + 1))), *others))


def empty(found: SegmentManifest) -> SegmentManifest:
    first, *others = found.segments
    return replace(found, segments=(first, *others, Segment(others[-1].number + 1, ())))


@pytest.mark.parametrize("spoil", [gap, disordered, overlap, empty])
def test_segments_that_do_not_have_all_rows(
    tmp_path: Path, spoil: Callable[[SegmentManifest], SegmentManifest]
) -> None:
    storage, path = full(), tmp_path / "saved"
    storage.dumps(path)
    with SegmentFolder.opened(path) as opened:
        found = opened.manifest
    shutil.rmtree(path / ".rbtool")
    (path / "segments.json").unlink()
    spoil(found).save(path)
    with pytest.raises(CorruptDataError, match=r"segments\.json does not list the segments of 64 rows"):
        LazyTensorStorage(ROWS).loads(path)
    storage.dumps(path)  # nothing of it is used
    LazyTensorStorage(ROWS).loads(path, verify=True)


DATA = Path(__file__).parents[2] / "data" / "checkpoints" / "segments-1"
"""A ring of 40 rows to which 50 were written, saved in format version 1 by rbtool at commit 77c84da2."""


def test_the_form_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, again = tmp_path / "saved", ReplayBuffer(storage=LazyTensorStorage(40))
    shutil.copytree(DATA, path)
    monkeypatch.setattr(segments, "_MAPPED_FROM", 1)
    for _ in range(2):
        again.loads(path, verify=True)
        found = again.storage[torch.arange(40)]
        numbers = torch.cat([torch.arange(40, 50), torch.arange(10, 40)])
        assert torch.equal(found["a"], numbers)
        assert torch.equal(found["next", "b"], torch.stack([numbers, -numbers], -1).double())
        assert torch.equal(found["next", "c"], (numbers % 3 == 0).unsqueeze(-1))
        assert again.writer.cursor == 10
        again.dumps(path)  # in the form of today
        assert json.loads((path / "storage" / "segments.json").read_text())["format_version"] == 2


@pytest.mark.parametrize(("entry", "value"), [("segment_rows", 0), ("segment_rows", 64), ("digests", [])])
def test_the_form_of_before_with_other_segments(tmp_path: Path, entry: str, value: Any) -> None:
    path = tmp_path / "saved"
    shutil.copytree(DATA / "storage", path)
    shutil.rmtree(path / ".rbtool")
    document = json.loads((path / "segments.json").read_text()) | {entry: value}
    document["digest"] = document_digest(document, "digest")
    (path / "segments.json").write_text(json.dumps(document))
    with pytest.raises(CorruptDataError):
        LazyTensorStorage(40).loads(path)
