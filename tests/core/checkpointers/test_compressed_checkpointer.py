from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from damage import without_digests
from tensordict import LazyStackedTensorDict, TensorDict

from rbtool.core.checkpointers.lists import CompressedListStorageCheckpointer
from rbtool.core.errors import CorruptDataError, DatasetNotFoundError, FormatError, SchemaError, UsageError
from rbtool.core.storages.list_storage import CompressedListStorage, ListStorage

CASES = Path(__file__).parents[2] / "data" / "torchrl_checkpoints"
NAMES = ("compressed_td_partly", "compressed_td_wrapped", "compressed_tensor_full")


def filled(*items: object, **options: object) -> CompressedListStorage:
    storage = CompressedListStorage(20, **options)
    storage.set(range(len(items)), list(items))
    return storage


def nested() -> TensorDict:
    entries = {
        "a": torch.arange(6).reshape(3, 2), "shape": torch.ones(3), "shape_": torch.zeros(3), "a/b": torch.ones(3, 1),
        "n": {"b": torch.ones(3, dtype=torch.bfloat16), "..": torch.zeros(3)}, "s": ["x", "y", "z"], "q": "one",
    }  # fmt: skip
    return TensorDict(entries, [3], device="cpu")


def entries(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def there_and_back(storage: CompressedListStorage, path: Path, **options: object) -> CompressedListStorage:
    storage.dumps(path)
    other = CompressedListStorage(30, **options)
    other.set(0, torch.zeros(1))
    other.loads(path)
    return other


# What TorchRL wrote --------------------------------------------------------------------------------------


def stacked(storage: CompressedListStorage) -> dict[str, np.ndarray]:
    found = torch.stack(storage[:])
    if isinstance(found, torch.Tensor):
        return {"_-single-tensor-_": found.numpy()}
    return {"/".join(key if isinstance(key, tuple) else (key,)): found[key].numpy() for key in found.keys(True, True)}


@pytest.mark.parametrize("name", NAMES)
def test_what_torchrl_wrote_is_read_bit_for_bit(name: str) -> None:
    case = json.loads((CASES / name / "case.json").read_text())
    storage = CompressedListStorage(case["capacity"])
    storage.loads(CASES / name / "checkpoint" / "storage")
    found, expected = stacked(storage), np.load(CASES / name / "expected.npz")
    assert len(storage) == case["len"]
    assert found.keys() == set(expected)
    for key, values in expected.items():
        assert (found[key].dtype, found[key].shape) == (values.dtype, values.shape)
        assert found[key].tobytes() == values.tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_what_torchrl_wrote_goes_on_under_our_codec(name: str, tmp_path: Path) -> None:
    storage = CompressedListStorage(20)
    storage.loads(CASES / name / "checkpoint" / "storage")
    storage.set(len(storage), storage[0])
    found = stacked(there_and_back(storage, tmp_path / "storage"))
    for key, values in np.load(CASES / name / "expected.npz").items():
        assert np.array_equal(found[key], np.concatenate([values, values[:1]]))
    codecs = json.dumps(json.loads((tmp_path / "storage/metadata.json").read_text()))
    assert '"zlib"' in codecs
    assert '"zstd"' in codecs


def test_a_custom_function_reads_what_records_no_codec() -> None:
    storage = CompressedListStorage(
        12, compression_fn=lambda tensor: tensor, decompression_fn=lambda data, about: (len(data), about["shape"])
    )
    storage.loads(CASES / "compressed_tensor_full/checkpoint/storage")
    assert storage[0] == (18, torch.Size([4]))


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore")  # TorchRL's own
@pytest.mark.parametrize(
    "items",
    [
        [torch.arange(4.0) + number for number in range(5)],
        [torch.ones(3, dtype=torch.bfloat16)],
        [TensorDict({"a": torch.arange(6).reshape(3, 2) + number}, [3]) for number in range(3)],
        [TensorDict({"a": torch.zeros(2), "s": "text"}, []), torch.ones(2), 5, "text", None],
    ],
)
def test_torchrl_reads_ours(items: list[object], tmp_path: Path) -> None:
    peer = pytest.importorskip("torchrl.data").CompressedListStorage(10)
    filled(*items, codec="zlib").dumps(tmp_path / "storage")
    peer.loads(tmp_path / "storage")
    assert len(peer) == len(items)
    for found, item in zip(peer, items, strict=True):
        if isinstance(item, TensorDict):
            assert found.batch_size == item.batch_size
            assert torch.equal(found["a"], item["a"])
            assert found.get("s", None) == item.get("s", None)
        else:
            assert torch.equal(found, item) if isinstance(item, torch.Tensor) else found == item


# Ours ----------------------------------------------------------------------------------------------------


def test_the_checkpointer_belongs_to_its_storage() -> None:
    assert type(CompressedListStorage(3).checkpointer) is CompressedListStorageCheckpointer
    with pytest.raises(UsageError, match="serves a CompressedListStorage, found a ListStorage"):
        CompressedListStorageCheckpointer().loads(ListStorage(3), "anywhere")


@pytest.mark.parametrize("codec", ["zstd", "zlib"])
def test_sharp_edges_6_and_20_nested_tensordicts_and_bfloat16_are_saved(codec: str, tmp_path: Path) -> None:
    (found,) = there_and_back(filled(nested(), codec=codec), tmp_path / "storage")[:]
    assert (found.batch_size, found["n"].batch_size, found.device.type) == ((3,), (3,), "cpu")
    assert (found["n", "b"].dtype, found["s"], found["q"]) == (torch.bfloat16, ["x", "y", "z"], "one")
    assert (found["a"] == nested()["a"]).all()
    assert [found[key].sum().item() for key in ("shape", "shape_", "a/b", ("n", ".."))] == [3, 0, 3, 0]


def test_sharp_edge_6_the_codec_is_recorded(tmp_path: Path) -> None:
    filled(torch.zeros(2), torch.zeros(2)).dumps(tmp_path / "storage")
    assert [about["codec"] for about in json.loads((tmp_path / "storage/metadata.json").read_text())] == ["zstd"] * 2
    other = CompressedListStorage(5, codec="zlib")
    other.loads(tmp_path / "storage")
    assert other[0].tolist() == [0, 0]


def test_every_kind_of_item_comes_back(tmp_path: Path) -> None:
    lazy = LazyStackedTensorDict(TensorDict({"u": torch.ones(1)}), TensorDict({"u": torch.ones(2)}))
    items = [{"a": (torch.ones(2), [1, None])}, np.arange(3), np.float32(4), "text", None, torch.zeros(0), {}, []]
    found = there_and_back(filled(lazy, *items), tmp_path / "storage")
    assert [part["u"].shape[0] for part in found[0].tensordicts] == [1, 2]
    assert repr(found[1:]) == repr(items)


def test_sharp_edge_4_keys_with_dots(tmp_path: Path) -> None:
    item = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}
    assert repr(there_and_back(filled(item), tmp_path / "storage")[0]) == repr(item)


def test_sharp_edge_6_no_element_type_is_evaluated(tmp_path: Path) -> None:
    filled(torch.zeros(2)).dumps(tmp_path / "storage")
    file, mark = tmp_path / "storage/metadata.json", tmp_path / "mark"
    text = file.read_text().replace("torch.float32", f"__import__('pathlib').Path('{mark}').touch()")
    file.write_text(text)
    refuses(tmp_path / "storage", FormatError, "is not an element type of torch")
    assert not mark.exists()


def test_nothing_is_decompressed_to_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = filled(nested(), torch.ones(2))
    monkeypatch.setattr(CompressedListStorage, "unpacked", lambda *_: pytest.fail("decompressed"))
    assert there_and_back(storage, tmp_path / "storage").bytes() == storage.bytes()


def by_halves(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.half().view(torch.uint8).reshape(-1)


def undo_halves(data: torch.Tensor, about: dict) -> torch.Tensor:
    return data.view(torch.float16).to(about["dtype"]).reshape(about["shape"])


def test_custom_functions_are_named_custom(tmp_path: Path) -> None:
    storage = filled(torch.ones(2, 3), torch.zeros(0), compression_fn=by_halves, decompression_fn=undo_halves)
    found = there_and_back(storage, tmp_path / "storage", decompression_fn=undo_halves)
    assert [item.tolist() for item in found] == [[[1, 1, 1], [1, 1, 1]], []]
    with pytest.raises(UsageError, match="this storage has no decompression_fn"):
        CompressedListStorage(5).loads(tmp_path / "storage")


def test_an_empty_storage_is_saved(tmp_path: Path) -> None:
    assert there_and_back(filled(), tmp_path / "storage")[:] == []


@pytest.mark.parametrize(
    ("item", "error", "message"),
    [
        (object(), SchemaError, "row 1: a object cannot be written"),
        ({1: 2}, SchemaError, "row 1: 1 is a key of a dict"),
        ({"x": {"y": torch.zeros(1)}, "x.memmap": torch.zeros(1)}, None, ""),
        ({"x": torch.zeros(1), "x.memmap": {"y": torch.zeros(1)}}, SchemaError, "need the same file"),
    ],
)
def test_what_cannot_be_saved(item: object, error: type[Exception] | None, message: str, tmp_path: Path) -> None:
    filled("old").dumps(tmp_path / "storage")
    if error is None:
        assert repr(there_and_back(filled("x", item), tmp_path / "storage")[1]) == repr(item)
        return
    with pytest.raises(error, match=message):
        filled("x", item).dumps(tmp_path / "storage")
    assert entries(tmp_path) == ["storage"]


# What cannot be loaded -----------------------------------------------------------------------------------


def refuses(path: Path, error: type[Exception], message: str) -> None:
    storage = CompressedListStorage(3)
    storage.set(0, "kept")
    with pytest.raises(error, match=message) as found:
        storage.loads(without_digests(path))
    assert "\n" not in str(found.value)
    assert storage[:] == ["kept"]


def saved(tmp_path: Path) -> Path:
    path = tmp_path / "storage"
    filled(TensorDict({"a": torch.arange(4), "n": {"b": torch.ones(2)}}, []), torch.zeros(2)).dumps(path)
    return path


@pytest.mark.parametrize("name", ["metadata.json", "data_indices.json"])
def test_a_missing_description(name: str, tmp_path: Path) -> None:
    path = saved(tmp_path)
    (path / name).unlink()
    refuses(path, FileNotFoundError, f"has no {name}, which a CompressedListStorageCheckpointer writes")


def test_nothing_there(tmp_path: Path) -> None:
    refuses(tmp_path / "absent", DatasetNotFoundError, "nothing at")


def test_a_checkpoint_of_another_class(tmp_path: Path) -> None:
    storage = ListStorage(2)
    storage.set(0, "x")
    storage.dumps(tmp_path / "storage")
    refuses(tmp_path / "storage", FormatError, "was written by a ListStorageCheckpointer; this is a Compressed")


def test_sharp_edge_6_more_than_there_is_room_for(tmp_path: Path) -> None:
    filled(*"abcd").dumps(tmp_path / "storage")
    refuses(tmp_path / "storage", SchemaError, "holds 4 objects; this storage has room for 3")


@pytest.mark.parametrize("leaf", ["0/a.memmap", "0/n/b.memmap", "1/data.memmap"])
@pytest.mark.parametrize("change", ["cut", "longer", "missing"])
def test_sharp_edge_8_files_of_a_wrong_size(leaf: str, change: str, tmp_path: Path) -> None:
    file = saved(tmp_path) / "compressed_data" / leaf
    size = file.stat().st_size
    if change == "missing":
        file.unlink()
    else:
        os.truncate(file, size + {"cut": -1, "longer": 1}[change])
    message = (
        f"is missing, expected {size} bytes" if change == "missing" else f"expected {size}: it was cut or overwritten"
    )
    refuses(file.parents[leaf.count("/") + 1], CorruptDataError, message)


@pytest.mark.parametrize("name", ["", "/1", "/0/n", "/0/meta.json"])
def test_missing_data(name: str, tmp_path: Path) -> None:
    path = saved(tmp_path)
    gone = path / f"compressed_data{name}"
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    refuses(path, CorruptDataError, r"meta.json is missing")


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([0], "describes 2 objects and numbers 1"),
        ([0, 1, 2], "describes 2 objects and numbers 3"),
        ([0, -1], "names the data -1 of at most 2"),
        ([0, 10**30], "names the data 10{30} of at most 2"),
        ([0, True], "names the data True"),
        ([0, "../1"], "names the data '../1'"),
        ([1, 1], "gives the same data to two objects"),
        ([0, None], "names no data for an object that has tensors"),
        ({"0": 0}, "must hold lists"),
        ([1, 0], "describes no vector of bytes 'a'"),
    ],
)
def test_hostile_indices(indices: object, message: str, tmp_path: Path) -> None:
    path = saved(tmp_path)
    (path / "data_indices.json").write_text(json.dumps(indices))
    refuses(path, ValueError, message)


def tagged(kind: str, value: object) -> dict[str, object]:
    return {"__type__": f"torch.{kind}", "value": value}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"type": "pickle"}, "'pickle' is no kind of item"),
        ({"type": "tensordict"}, "'fields' of a described item is None"),
        ({"type": "mapping", "fields": {"../../x": {"type": "tensor"}}}, "describes no vector of bytes"),
        ({"dtype": tagged("dtype", "__import__('os').abort()")}, "is not an element type of torch"),
        ({"dtype": {}}, "None is not an element type"),
        ({"shape": tagged("Size", [-1])}, "is no shape"),
        ({"shape": tagged("Size", [2**70])}, "is the shape of no tensor"),
        ({"shape": tagged("Size", [2**50])}, "cannot hold the"),
        ({"codec": "rot13"}, "the codec 'rot13' is unknown"),
        ({"codec": ["zstd"]}, r"the codec \['zstd'\] is unknown"),
        ({"codec": "custom"}, "has no decompression_fn"),
    ],
)
def test_hostile_descriptions(change: dict[str, object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "storage"
    filled(torch.zeros(2)).dumps(path)
    (about,) = json.loads((path / "metadata.json").read_text())
    (path / "metadata.json").write_text(json.dumps([about | change]))
    refuses(path, ValueError, message)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("metadata.json", "{", "is not JSON"),
        ("metadata.json", "[" * 10**5, "nests deeper than 100 levels"),
        ("data_indices.json", "5", "must hold lists"),
        ("compressed_data/1/meta.json", "[]", "describes no vector of bytes 'data'"),
        ("compressed_data/1/meta.json", '{"data":{"shape":[-4],"dtype":"torch.uint8"}}', "bytes, expected -4"),
        ("compressed_data/1/meta.json", '{"data":{"shape":5,"dtype":"torch.uint8"}}', "describes no vector of bytes"),
        ("compressed_data/1/meta.json", '{"data":{"shape":[21],"dtype":"torch.int8"}}', "describes no vector of bytes"),
    ],
)
def test_hostile_files(name: str, text: str, message: str, tmp_path: Path) -> None:
    path = saved(tmp_path)
    (path / name).write_text(text)
    refuses(path, ValueError, message)


def test_changed_bytes_are_found_at_once_or_without_digests_when_read(tmp_path: Path) -> None:
    path = saved(tmp_path)
    file = path / "compressed_data/0/a.memmap"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.write_bytes(data)
    storage = CompressedListStorage(3)
    with pytest.raises(CorruptDataError, match="does not hold the bytes that were saved"):
        storage.loads(path)
    storage.loads(without_digests(path))
    assert storage[1].tolist() == [0, 0]
    with pytest.raises(CorruptDataError, match="compressed bytes are cut or damaged"):
        storage[0]


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path)
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, lambda *_, **__: pytest.fail("unpickled"))
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("unpickled"))
    storage = CompressedListStorage(3)
    storage.loads(path)
    assert storage[0]["n", "b"].tolist() == [1, 1]
