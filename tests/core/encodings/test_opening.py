import os
from dataclasses import replace
from pathlib import Path

import h5py
import pytest
import torch
from tensordict import TensorDict

from rbtool import CorruptDataError, DatasetNotFoundError, FormatError
from rbtool.core.encodings.compact import Form
from rbtool.core.encodings.flat import FlatReader
from rbtool.core.encodings.h5_layout import H5Reader
from rbtool.core.encodings.save import save_checkpoint
from rbtool.core.format.manifest import MANIFEST, Manifest
from rbtool.core.format.memmap.reader import PlainReader, TedReader
from rbtool.core.open_steps import is_steps, open_steps


@pytest.mark.parametrize(
    ("form", "reader"), [("ted", TedReader), ("flat", FlatReader), ("nested", FlatReader), ("h5", H5Reader)]
)
def test_a_form_is_recognised_by_its_content(odd: Path, tmp_path: Path, form: Form, reader: type) -> None:
    target = tmp_path / "named anyhow"
    if form != "h5":
        target.mkdir()
    with open_steps(odd) as dataset:
        save_checkpoint(dataset, target, form)
    assert is_steps(target)
    with open_steps(str(target)) as found:
        assert type(found) is reader


def test_a_plain_tensordict_of_steps_opens_too(tmp_path: Path) -> None:
    TensorDict({"episode": torch.arange(3)}, [3]).memmap(tmp_path / "plain")
    assert is_steps(tmp_path / "plain")
    with open_steps(tmp_path / "plain") as reader:
        assert type(reader) is PlainReader


def test_a_flat_checkpoint_of_somebody_else_is_refused(tmp_path: Path) -> None:
    data = {"observation": torch.zeros(12, 2), "action": torch.zeros(10), "done": torch.zeros(10, 1, dtype=torch.bool)}
    TensorDict(data, []).memmap(tmp_path / "flat")
    with pytest.raises(FormatError, match="not one row a step"):
        open_steps(tmp_path / "flat")


def test_nothing_is_not_found(tmp_path: Path) -> None:
    assert not is_steps(tmp_path / "there")
    with pytest.raises(DatasetNotFoundError, match="nothing at"):
        open_steps(tmp_path / "there")


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetNotFoundError, match="is an empty folder"):
        open_steps(tmp_path)
    (tmp_path / "notes.txt").touch()
    assert not is_steps(tmp_path)
    with pytest.raises(FormatError, match="is no dataset and no checkpoint"):
        open_steps(tmp_path)


def test_a_cut_hdf5_file_is_named(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "cut.h5", "w") as h5:
        h5["a"] = range(1000)
    os.truncate(tmp_path / "cut.h5", 1000)
    with pytest.raises(CorruptDataError, match="HDF5 cannot read the file"):
        open_steps(tmp_path / "cut.h5")


@pytest.mark.parametrize("data", [b"", b"{}", b"text\n", b'{\n "format_version": '])
def test_files_of_somebody_else_are_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(FormatError, match="file"):
        open_steps(tmp_path / "file")


@pytest.mark.parametrize("layout", ["packed", "h5", "sideways"])
def test_layouts_that_are_no_folder_here_are_refused(odd: Path, layout: str) -> None:
    manifest = replace(Manifest.load(odd), layout=layout)
    (odd / MANIFEST).write_bytes(manifest.to_bytes())
    with pytest.raises(FormatError, match=layout):
        open_steps(odd)
