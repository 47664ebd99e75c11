from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rbtool import CorruptDataError, FormatError, SchemaError
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.format.memmap.tree import MappedLeaf, TreeWriter, leaf_path, read_tree
from rbtool.core.format.open_files import OpenFiles
from rbtool.core.ted.schema import DTYPES, Field
from rbtool.core.testing.datasets import write_walks


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (1, 2, 2)])
def test_tensordict_reads_every_type_and_shape(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    field = Field(("a", "b c"), dtype, shape, "info")
    rows = (np.arange(5 * np.prod(shape, dtype=int)) % 2).reshape(5, *shape).astype(DTYPES[dtype])
    writer = TreeWriter(tmp_path / "tree", [field])
    writer.append({field.key: rows[:2]})
    writer.append({field.key: rows[2:]})
    writer.finish((5,))
    found = TensorDict.load_memmap(tmp_path / "tree")[field.key]
    assert found.shape == (5, *shape)
    assert found.dtype == getattr(torch, dtype)
    bits = found.view(torch.uint16).numpy() if dtype == "bfloat16" else found.numpy()
    np.testing.assert_array_equal(bits, rows)
    assert read_tree(OpenFiles(tmp_path / "tree")) == {field.key: MappedLeaf(dtype, (5, *shape))}


def test_what_tensordict_writes_is_read(tmp_path: Path) -> None:
    data = TensorDict({"x": torch.arange(6).view(3, 2), "n": {"y": torch.rand(3)}}, [3]).memmap(tmp_path / "td")
    assert read_tree(OpenFiles(tmp_path / "td")) == {
        ("x",): MappedLeaf("int64", (3, 2)),
        ("n", "y"): MappedLeaf("float32", (3,)),
    }
    assert data.batch_size == (3,)


def test_a_dataset_opens_in_tensordict_with_all_its_values(tmp_path: Path) -> None:
    write_walks(tmp_path / "data", [(4, "open"), (2, "terminated")])
    data = TensorDict.load_memmap(tmp_path / "data")
    with TedReader(tmp_path / "data") as reader:
        assert {key if isinstance(key, tuple) else (key,) for key in data.keys(True, True)} == {
            field.key for field in reader.fields
        }
        for field in reader.fields:
            np.testing.assert_array_equal(data[field.key].numpy(), reader.read(field.key, 0, 6))


@pytest.mark.parametrize("keys", [[("a",), ("a",)], [("a", "b"), ("a",)], [("x.memmap", "b"), ("x",)]])
def test_keys_that_need_one_file_are_refused(tmp_path: Path, keys: list[tuple[str, ...]]) -> None:
    fields = [Field(key, "int8", (), "info") for key in keys]
    with pytest.raises(SchemaError, match="same file"):
        TreeWriter(tmp_path / "tree", fields).finish((0,))


def test_rows_of_another_type_or_shape_are_refused(tmp_path: Path) -> None:
    writer = TreeWriter(tmp_path / "tree", [Field(("a",), "float32", (2,), "info")])
    for rows in (np.zeros((3, 2)), np.zeros((3, 3), np.float32), np.zeros(3, np.float32)):
        with pytest.raises(SchemaError, match=r"rows of 'a' are .* expected float32 \[2\]"):
            writer.append({("a",): rows})
    writer.close()


def test_cut_and_missing_files_are_found(tmp_path: Path) -> None:
    write_walks(tmp_path / "data", [(4, "open")])
    path = tmp_path / "data" / leaf_path(("next", "reward"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptDataError, match=r"reward.memmap has 31 bytes, expected 32"):
        read_tree(OpenFiles(tmp_path / "data"))
    path.unlink()
    with pytest.raises(CorruptDataError, match="is missing"):
        read_tree(OpenFiles(tmp_path / "data"))


@pytest.mark.parametrize("meta", ["{}", "[]", "x", '{"_type": "t", "a": {"dtype": "torch.quint8", "shape": [1]}}'])
def test_a_folder_that_is_no_tensordict_is_said_to_be_none(tmp_path: Path, meta: str) -> None:
    (tmp_path / "meta.json").write_text(meta)
    with pytest.raises(FormatError):
        read_tree(OpenFiles(tmp_path))
