from __future__ import annotations

import multiprocessing
import pickle
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tensordict import LazyStackedTensorDict, TensorDict, tensorclass

from rbtool.core.errors import CorruptDataError, FormatError, SchemaError, UsageError
from rbtool.core.storages.list_storage import CompressedListStorage
from rbtool.core.testing.storages import StorageTests

CODECS = ("zstd", "zlib")


@tensorclass
class Step:
    observation: torch.Tensor
    text: str = ""


def filled(*items: object, **options: object) -> CompressedListStorage:
    storage = CompressedListStorage(20, **options)
    storage.set(range(len(items)), list(items))
    storage.last_cursor = None
    return storage


def step(number: int) -> TensorDict:
    inner = TensorDict({"b": torch.full((3,), float(number)), "deep": {"c": torch.tensor(number)}}, [])
    return TensorDict({"a": torch.arange(6).reshape(3, 2) + number, "next": inner}, [])


class TestOfTensors(StorageTests):
    def make(self) -> CompressedListStorage:
        return filled(*torch.arange(20).reshape(10, 2))


class TestOfNestedTensorDicts(StorageTests):
    def make(self) -> CompressedListStorage:
        return filled(*map(step, range(10)), codec="zlib")


class TestOfTrees(StorageTests):
    def make(self) -> CompressedListStorage:
        return filled(*({"a": torch.tensor(n), "b": [torch.ones(n), (torch.zeros(2, n),)]} for n in range(10)))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int32, torch.uint64, torch.float16, torch.bfloat16,
        torch.float64, torch.complex64, torch.float8_e4m3fn,
    ],
)  # fmt: skip
def test_every_element_type_comes_back(codec: str, dtype: torch.dtype) -> None:
    data = (torch.arange(24) % 7).float().to(dtype).reshape(2, 3, 4)
    for tensor in (data, data.mT, data[0, 0, 0], data[:, :0]):
        found = filled(tensor, codec=codec)[0]
        assert (found.dtype, found.shape) == (dtype, tensor.shape)
        assert found.flatten().tolist() == tensor.flatten().tolist()


def test_conjugates_and_gradients_are_resolved() -> None:
    conjugate = torch.tensor([1 + 2j]).conj()
    assert filled(conjugate, torch.ones(2, requires_grad=True))[:1][0].tolist() == [1 - 2j]


@pytest.mark.parametrize("codec", CODECS)
def test_sharp_edge_6_nested_tensordicts_are_compressed_and_keep_their_batch_size(codec: str) -> None:
    entries = {"a": torch.zeros(4, 1000), "n": {"b": torch.zeros(4, 1000)}, "s": list("wxyz")}
    item = TensorDict(entries, [4], device="cpu")
    storage = filled(item, codec=codec)
    found = storage[0]
    assert storage.bytes() < 200
    assert (found.batch_size, found["n"].batch_size, found.device.type) == ((4,), (4,), "cpu")
    assert found["s"] == list("wxyz")
    assert found["n", "b"].shape == (4, 1000)


def test_sharp_edge_6_the_codec_is_that_of_the_name_on_every_python() -> None:
    assert filled(torch.zeros(2)).codec == "zstd"
    assert filled(torch.zeros(2)).state_dict()["_storage"][0][:4].tolist() == [0x28, 0xB5, 0x2F, 0xFD]


def test_sharp_edge_12_the_length_is_not_counted_item_by_item() -> None:
    storage = filled(*range(10))
    storage._items = type("Counted", (list,), {"__iter__": lambda self: pytest.fail("counted")})(storage._items)
    assert len(storage) == 10


def test_every_kind_of_item_comes_back() -> None:
    lazy = LazyStackedTensorDict(TensorDict({"u": torch.ones(1)}), TensorDict({"u": torch.ones(2)}))
    items = [{"a": (torch.ones(2), [1, None])}, np.arange(3, dtype=np.uint16), np.float32(4), "text", None,
             Step(torch.zeros(3), "hi", batch_size=[3]), {1: torch.ones(1)}]  # fmt: skip
    storage = filled(lazy, *items)
    assert [part["u"].shape[0] for part in storage[0].tensordicts] == [1, 2]
    assert repr(storage[1:]) == repr(items)


def test_what_is_read_is_fresh() -> None:
    storage = filled(torch.zeros(3))
    storage[0].fill_(7)
    assert storage[0].tolist() == [0, 0, 0]


def test_later_writes_do_not_reach_what_was_stored() -> None:
    item = torch.zeros(3)
    storage = filled(item)
    item.fill_(7)
    assert storage[0].tolist() == [0, 0, 0]


@pytest.mark.parametrize("index", [1, [0, 1], torch.tensor([4])])
def test_a_slot_that_was_never_set_is_an_index_error(index: object) -> None:
    with pytest.raises(IndexError, match="expected one of 1 rows"):
        filled(torch.zeros(1))[index]


# Custom functions ----------------------------------------------------------------------------------------


def by_zlib(tensor: torch.Tensor) -> torch.Tensor:
    return torch.frombuffer(bytearray(zlib.compress(tensor.numpy().tobytes())), dtype=torch.uint8)


def undo_zlib(data: torch.Tensor, about: dict) -> torch.Tensor:
    raw = bytearray(zlib.decompress(data.numpy().tobytes()))
    return torch.frombuffer(raw, dtype=about["dtype"]).reshape(about["shape"]).to(about["device"])


CUSTOM = {"compression_fn": by_zlib, "decompression_fn": undo_zlib}


class TestWithCustomFunctions(StorageTests):
    def make(self) -> CompressedListStorage:
        return filled(*torch.arange(20).reshape(10, 2), **CUSTOM)


def test_custom_functions_get_every_tensor() -> None:
    storage = filled(step(3), **CUSTOM)
    assert storage[0]["next", "deep", "c"].item() == 3
    assert storage.bytes() == sum(len(data) for data in storage.state_dict()["_storage"][0].values())


@pytest.mark.parametrize(
    ("found", "message"),
    [(torch.zeros(2), "torch.float32"), (b"ab", "a bytes"), (torch.zeros(2, 2).byte(), r"\[2, 2\]")],
)
def test_a_function_that_gives_no_bytes_is_refused(found: object, message: str) -> None:
    storage = CompressedListStorage(3, compression_fn=lambda _: found)
    with pytest.raises(SchemaError, match=f"compression_fn returned .*{message}"):
        storage.set(0, torch.zeros(2))
    assert len(storage) == 0


def test_a_function_that_fails_changes_nothing() -> None:
    def picky(tensor: torch.Tensor) -> torch.Tensor:
        return by_zlib(tensor) if tensor.sum() < 3 else pytest.raises(1)

    storage = CompressedListStorage(9, compression_fn=picky, decompression_fn=undo_zlib)
    storage.set(0, torch.ones(1))
    with pytest.raises(TypeError):
        storage.set([0, 1], [torch.zeros(1), torch.full((1,), 9.0)])
    assert [item.tolist() for item in storage] == [[1]]


def test_functions_that_give_views_open_no_way_in() -> None:
    storage = CompressedListStorage(
        3,
        compression_fn=lambda tensor: tensor.view(torch.uint8),
        decompression_fn=lambda data, _: data.view(torch.float32),
    )
    item = torch.ones(2)
    storage.set(0, item)
    item.zero_()
    storage[0].zero_()
    assert storage[0].tolist() == [1, 1]


def test_bytes_of_a_function_need_the_one_that_undoes_it() -> None:
    with pytest.raises(UsageError, match="no decompression_fn"):
        filled(torch.zeros(2), compression_fn=by_zlib)[0]
    with pytest.raises(UsageError, match="no decompression_fn"):
        CompressedListStorage(3).load_state_dict(filled(torch.zeros(2), **CUSTOM).state_dict())


# Arguments and helpers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"codec": "lz4"}, "the codec 'lz4' is unknown; known: zlib, zstd"),
        ({"codec": "zlib", "compression_level": 10}, "level 10 is not known to zlib, which has -1 to 9"),
        ({"compression_level": 23}, "level 23 is not known to zstd"),
    ],
)
def test_arguments_that_cannot_be(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        CompressedListStorage(3, **options)


def test_levels_differ() -> None:
    data = torch.arange(20000) ** 2 % 977
    assert filled(data, compression_level=19).bytes() < filled(data, compression_level=1).bytes() < data.nbytes


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8).T, b"\1\3\2\4"),
        (np.array([1, 258], dtype=">u2"), b"\0\1\1\2"),
        (b"ab", b"ab"),
        (bytearray(b"ab"), b"ab"),
    ],
)
def test_to_bytestream(data: object, expected: bytes) -> None:
    assert CompressedListStorage(1).to_bytestream(data) == expected


@pytest.mark.parametrize("data", ["text", [1], object(), np.array([object()])])
def test_what_has_no_bytes_of_its_own(data: object) -> None:
    with pytest.raises(TypeError, match="has no bytes of its own"):
        CompressedListStorage.to_bytestream(data)


def test_sharing_across_spawn_is_refused() -> None:
    child = multiprocessing.get_context("spawn").Process(target=print, args=(filled(torch.zeros(1)),))
    with pytest.raises(RuntimeError, match="a CompressedListStorage cannot be shared"):
        child.start()


def test_pickled_whole() -> None:
    other = pickle.loads(pickle.dumps(filled(step(2), "x")))
    assert (other[0]["next", "deep", "c"].item(), other[1]) == (2, "x")


# State ---------------------------------------------------------------------------------------------------


def test_sharp_edge_6_a_state_keeps_codecs_and_takes_no_part_in_later_writes() -> None:
    storage, other = filled(step(1), torch.ones(2), "x", codec="zlib"), filled(torch.zeros(1))
    state = storage.state_dict()
    storage[1] = torch.zeros(5)
    other.load_state_dict(state)
    assert (other[1].tolist(), other[2], other[0]["next", "b"].tolist()) == ([1, 1], "x", [1, 1, 1])
    state["_storage"][1].zero_()
    assert other[1].tolist() == [1, 1]
    other.set(3, torch.ones(1))
    assert [about.get("codec") for about in other.state_dict()["_metadata"]] == [None, "zlib", None, "zstd"]


def test_a_state_of_torchrl_is_read_by_what_its_bytes_say() -> None:
    about = {"type": "tensor", "shape": torch.Size([2]), "dtype": torch.int64, "device": torch.device("cpu")}
    packed = by_zlib(torch.tensor([5, 6]))
    other = CompressedListStorage(5)
    other.load_state_dict({
        "_storage": [packed, {"a": packed}, 7],
        "_metadata": [about, {"type": "tensordict", "fields": {"a": about}}, {"type": "other", "value": 7}],
    })  # fmt: skip
    assert (other[0].tolist(), other[1]["a"].tolist(), other[2]) == ([5, 6], [5, 6], 7)


def broken(change: dict[str, object]) -> dict[str, object]:
    state = filled(torch.zeros(2)).state_dict()
    return {"_storage": state["_storage"], "_metadata": [state["_metadata"][0] | change]}


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        (filled(*range(20)).state_dict(), SchemaError, "20 objects are to be loaded; this storage has room for 5"),
        ({"_storage": [1], "_metadata": []}, SchemaError, "holds 1 objects and describes 0"),
        ({"_storage": [1], "_metadata": [{"type": "tensor"}]}, SchemaError, "has no tensor ''"),
        ({"_storage": [1], "_metadata": ["x"]}, FormatError, "described by 'x', expected an object"),
        ({"_storage": [1], "_metadata": [{"type": "pickle"}]}, FormatError, "'pickle' is no kind of item"),
        (broken({"codec": "lz4"}), FormatError, "codec 'lz4' is unknown"),
        (broken({"dtype": "torch.load"}), FormatError, "'torch.load' is not an element type"),
        (broken({"dtype": "__import__('os')"}), FormatError, "is not an element type"),
        (broken({"shape": [-1]}), FormatError, "is no shape"),
        (broken({"shape": [True]}), FormatError, "is no shape"),
        (broken({"shape": [2**61]}), FormatError, "is the shape of no tensor"),
        (broken({"shape": [2**40]}), CorruptDataError, "cannot hold the 4,398,046,511,104 expected"),
    ],
)
def test_a_state_that_cannot_be_loaded_changes_nothing(state: dict, error: type[Exception], message: str) -> None:
    storage = CompressedListStorage(5)
    storage.set(0, torch.ones(1))
    with pytest.raises(error, match=message):
        storage.load_state_dict(state)
    assert [item.tolist() for item in storage] == [[1]]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("damage", ["cut", "changed", "longer", "other shape"])
def test_damaged_bytes_are_told_when_read(codec: str, damage: str) -> None:
    state = filled(torch.arange(300), codec=codec).state_dict()
    data, about = state["_storage"][0], state["_metadata"][0]
    if damage == "cut":
        data = data[:-9]
    elif damage == "changed":
        data[len(data) // 2] ^= 0xFF
    elif damage == "longer":
        data = torch.cat([data, data[:3]])
    else:
        about["shape"] = [299]
    other = CompressedListStorage(5)
    other.load_state_dict({"_storage": [data], "_metadata": [about]})
    with pytest.raises(CorruptDataError, match="compressed bytes"):
        other[0]


def test_bytes_of_no_codec() -> None:
    about = {"type": "tensor", "shape": [1], "dtype": "torch.int64"}
    with pytest.raises(FormatError, match="begin neither like zlib nor like zstd"):
        CompressedListStorage(5).load_state_dict({"_storage": [torch.zeros(9).byte()], "_metadata": [about]})


# Against a plain list ------------------------------------------------------------------------------------

ARRAYS = hnp.arrays(
    st.sampled_from([np.float32, np.int64, np.bool_, np.uint8]), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0)
)
WRITES = st.lists(st.tuples(st.lists(st.integers(0, 5), min_size=1, max_size=4), ARRAYS), max_size=6)


@settings(max_examples=50, deadline=None)
@given(WRITES, st.sampled_from(CODECS))
def test_like_a_plain_list(writes: list[tuple[list[int], np.ndarray]], codec: str) -> None:
    storage, model = CompressedListStorage(6, codec=codec), []
    for rows, array in writes:
        items = [{"a": torch.tensor(array), "n": number} for number in range(len(rows))]
        written = dict(enumerate(model)) | dict(zip(rows, items, strict=True))
        if max(written) < len(written):
            storage.set(rows, items)
            model = [written[number] for number in range(len(written))]
        else:
            with pytest.raises(SchemaError):
                storage.set(rows, items)
    assert [item["n"] for item in storage] == [item["n"] for item in model]
    for found, expected in zip(storage, model, strict=True):
        assert found["a"].dtype == expected["a"].dtype
        assert torch.equal(torch.nan_to_num(found["a"]), torch.nan_to_num(expected["a"]))


def test_an_element_of_any_stride_is_kept() -> None:
    storage = CompressedListStorage(3)
    storage.set(0, torch.arange(6).view(3, 2)[1:2, 1])
    assert storage[0].tolist() == [3]
