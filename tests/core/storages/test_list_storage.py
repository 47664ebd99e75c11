from __future__ import annotations

import multiprocessing
import zlib
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from cases import each, in_loops, suite_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, tensorclass

from rbtool.core.errors import CorruptDataError, FormatError, SchemaError, UsageError
from rbtool.core.storages.list_storage import CompressedListStorage, LazyStackStorage, ListStorage
from rbtool.core.testing.storages import StorageFillTests, StorageTests

Pair = namedtuple("Pair", ["left", "right"])


@tensorclass
class Step:
    observation: torch.Tensor
    text: str = ""


def row(number: int) -> TensorDict:
    inner = {"observation": torch.full((3,), float(number)), "reward": torch.tensor([number / 2])}
    return TensorDict({"action": torch.tensor(number), "next": inner}, [])


def ragged_tree(number: int) -> dict[str, Any]:
    return {"a": torch.tensor(number), "b": [torch.ones(number), (torch.zeros(2, number),)]}


def filled(*items: object, max_size: int | None = 10) -> ListStorage:
    storage = ListStorage(max_size)
    storage.set(range(len(items)), list(items))
    storage.last_cursor = None
    return storage


TestStorages = suite_of(
    StorageTests,
    tensors=lambda: filled(*torch.arange(20).reshape(10, 2)),
    tensordicts=lambda: filled(*map(row, range(10)), max_size=None),
    trees=lambda: filled(*map(ragged_tree, range(10))),
    partly_filled=lambda: filled(*torch.arange(20).reshape(10, 2), max_size=25),
    compressed_tensors=lambda: compressed(*torch.arange(20).reshape(10, 2)),
    compressed_tensordicts=lambda: compressed(*map(step, range(10)), codec="zlib"),
    compressed_trees=lambda: compressed(*map(ragged_tree, range(10))),
    compressed_by_functions=lambda: compressed(*torch.arange(20).reshape(10, 2), **CUSTOM),
)


@pytest.mark.parametrize("item", ["text", None, {1: "a"}, [1, [2]], (1, "b"), {5}, b"bytes", object()])
def test_any_object_is_kept_as_it_is(item: object) -> None:
    storage = ListStorage(3)
    storage.set(0, item)
    assert storage[0] is item
    assert storage[[0]][0] is item


@pytest.mark.parametrize(
    "data",
    [
        [5, 6], (5, 6), range(5, 7), np.array([5, 6]), torch.tensor([5, 6]),
        TensorDict({"a": torch.tensor([5, 6])}, [2]),
        LazyStackedTensorDict(TensorDict({"a": torch.tensor(5)}), TensorDict({"a": torch.tensor(6)})),
        Step(torch.tensor([5, 6]), batch_size=[2]),
    ],
)  # fmt: skip
def test_several_rows_are_written_one_by_one(data: object) -> None:
    storage = filled(0, 1, 2)
    storage.set([2, 1], data)
    kinds = {Step: lambda item: item.observation, TensorDict: lambda item: item["a"]}
    assert [int(kinds.get(type(item), int)(item)) for item in storage] == [0, 6, 5]
    assert (type(storage[1]) is Step) == (type(data) is Step)


@pytest.mark.parametrize(
    "data", ["ab", {"a": [1, 2]}, 3, torch.tensor(1), np.array(2), TensorDict({}, []), iter([1, 2])]
)
def test_data_without_rows_are_a_type_error(data: object) -> None:
    storage = filled("x", "y")
    with pytest.raises(TypeError, match="several rows cannot be written from a"):
        storage.set([0, 1], data)
    assert storage[:] == ["x", "y"]


@pytest.mark.parametrize(
    ("cursor", "data", "message"),
    [
        (9, 1, "row 9 cannot be written yet: only 5 rows"),
        (10, 1, "row 10 cannot be written: the capacity is 10 rows"),
        ([5, 7], [1, 2], "row 7 cannot be written yet"),
        (range(8, 11), [1, 2, 3], "row 10 cannot be written: the capacity"),
        ([0, 1], [1], "found 1 objects for 2 rows"),
        (slice(0, 2), torch.zeros(3), "found 3 objects for 2 rows"),
        ((1, 2), 1, "found 2 coordinates, but a list has one dimension"),
        (((1, 2),), 1, "found 2 coordinates"),
    ],
)
def test_a_refused_write_is_a_runtime_error_and_changes_nothing(cursor: object, data: object, message: str) -> None:
    storage = filled(*"abcde")
    before = storage.log.now
    with pytest.raises(RuntimeError, match=message):
        storage.set(cursor, data)
    assert (storage[:], storage.last_cursor, storage.log.now) == (list("abcde"), None, before)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (torch.zeros(2, 2, dtype=torch.int64), "found an index of shape"),
        ([0.5], "selected by whole numbers"),
        ("a", "found the type str"),
        ({"a": 1}, "found the type dict"),
        (True, "a mask of 0 dimensions"),
        (torch.tensor([True, False]), "the mask is for 2 rows, expected 5"),
        *((index, r"row is -?\d, expected one of 5") for index in (5, [0, 5], np.array([-6]), range(4, 7))),
    ],
)
def test_an_index_that_names_no_rows_is_refused(index: object, message: str) -> None:
    with pytest.raises(IndexError, match=message):
        filled(*"abcde")[index]


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (2, "c"), (-1, "e"), (np.int32(1), "b"), (torch.tensor(3), "d"), ((2,), "c"), (slice(1, 3), ["b", "c"]),
        (slice(None, None, -2), ["e", "c", "a"]), (slice(3, 99), ["d", "e"]), ([4, 0, 4], ["e", "a", "e"]),
        (np.array([1, -1]), ["b", "e"]), ((torch.tensor([2]),), ["c"]), ([True, False, False, False, True], ["a", "e"]),
        (np.array([False, True, False, False, False]), ["b"]), (..., list("abcde")), ([], []), (range(0), []),
    ],
)  # fmt: skip
def test_rows_are_read_by_every_kind_of_index(index: object, expected: object) -> None:
    assert filled(*"abcde")[index] == expected


def test_rows_are_written_by_mask() -> None:
    storage = filled(*"abc")
    storage[torch.tensor([True, False, True])] = ["x", "y"]
    assert storage[:] == ["x", "b", "y"]


def test_later_rows_win_where_a_cursor_repeats_and_fresh_rows_come_in_any_order() -> None:
    storage = ListStorage(10)
    storage.set(torch.arange(25) % 10, range(25))
    assert storage[:] == [20, 21, 22, 23, 24, 15, 16, 17, 18, 19]
    storage = filled(*"ab")
    storage.set([4, 0, 2, 3, 0], list("EXCDA"))
    assert storage[:] == list("AbCDE")


def test_the_capacity_is_a_number_of_64_bits() -> None:
    assert ListStorage().max_size == 2**63 - 1
    with pytest.raises(UsageError, match="expected a number from 1"):
        ListStorage(0)


def test_the_device_moves_tensors_wherever_they_are() -> None:
    storage = ListStorage(10, device="meta")
    storage.set(range(2), [{"a": (torch.zeros(2), [row(1)]), "b": Pair(torch.ones(1), "x")}, "text"])
    found = storage[0]
    assert {found["a"][0].device.type, found["a"][1][0].device.type, found["b"].left.device.type} == {"meta"}
    assert (found["b"].right, storage[1]) == ("x", "text")


@pytest.mark.parametrize("kind", [ListStorage, CompressedListStorage])
def test_sharing_across_spawn_is_refused(kind: type[ListStorage]) -> None:
    child = multiprocessing.get_context("spawn").Process(target=print, args=(kind(2),))
    with pytest.raises(RuntimeError, match=f"a {kind.__name__} cannot be shared with a spawned process"):
        child.start()


# State -------------------------------------------------------------------------------------------------


def odd_items() -> list[object]:
    nested = TensorDict({"a": torch.arange(6).reshape(3, 2), "n": {"b": torch.ones(3)}, "s": "hey"}, [3], device="cpu")
    lazy = LazyStackedTensorDict(TensorDict({"u": torch.ones(1)}), TensorDict({"u": torch.ones(2)}))
    nests = [{"a": (torch.ones(2), [1, None])}, Pair(torch.ones(1), 2), {1: torch.ones(1)}]
    numbers = [np.arange(3), np.int16(4), float("inf")]
    return [nested, lazy, torch.tensor(3), "text", None, *nests, *numbers, Step(torch.zeros(3), "hi", batch_size=[3])]


@pytest.mark.parametrize("kind", [ListStorage, CompressedListStorage])
def test_every_kind_of_item_comes_back_from_a_state(kind: type[ListStorage]) -> None:
    storage, other = kind(20), kind(20)
    storage.set(range(len(odd_items())), odd_items())
    other.set(0, "old")
    other.load_state_dict(storage.state_dict())
    nested, lazy, *rest = other[:]
    assert (nested.batch_size, nested["n"].batch_size, nested["s"], nested.device.type) == ((3,), (3,), "hey", "cpu")
    assert [part["u"].shape[0] for part in lazy.tensordicts] == [1, 2]
    assert repr(rest) == repr(odd_items()[2:])
    assert [type(item) for item in rest] == [type(item) for item in odd_items()[2:]]


def test_a_state_shares_no_memory_with_storages() -> None:
    storage, other = filled(torch.zeros(2), row(1)), ListStorage(5)
    state = storage.state_dict()
    storage[0] = torch.ones(2)
    other.load_state_dict(state)
    assert other[0].tolist() == [0, 0]
    other[1]["next", "observation"].fill_(7)
    assert storage[1]["next", "observation"].tolist() == [1, 1, 1]


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    storage = filled("a", max_size=2)
    with pytest.raises(SchemaError, match="3 objects do not fit: this storage has room for 2"):
        storage.load_state_dict(filled(*"xyz").state_dict())
    state = filled(torch.zeros(1), {"a": torch.zeros(1)}).state_dict()
    for broken, message in (
        (state | {"_metadata": state["_metadata"][:1]}, "holds 2 objects, but describes 1"),
        (state | {"_storage": [torch.zeros(1), {}]}, "the state describes a tensor 'a', but does not hold it"),
    ):
        with pytest.raises(SchemaError, match=message):
            storage.load_state_dict(broken)
    assert storage[:] == ["a"]


@pytest.mark.parametrize("kind", [ListStorage, CompressedListStorage])
def test_keys_that_dots_make_alike_are_kept_apart_in_a_state(kind: type[ListStorage]) -> None:
    storage, other = kind(1), kind(1)
    storage.set(0, {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}})
    other.load_state_dict(storage.state_dict())
    assert (other[0]["a.b"].item(), other[0]["a"]["b"].item()) == (0, 1)


def test_a_state_of_torchrl_keeps_batch_sizes() -> None:
    item = TensorDict({"a": torch.zeros(3, 2), "n": TensorDict({"b": torch.ones(3)}, [3]), "s": "hey"}, [3])
    storage = ListStorage(5)
    storage.load_state_dict({"_storage": [item.state_dict(), torch.arange(2), OrderedDict(x=torch.tensor(5))]})
    found = storage[0]
    assert (found.batch_size, found["n"].batch_size, found["s"]) == ((3,), (3,), "hey")
    assert found["n", "b"].tolist() == [1, 1, 1]
    assert (storage[1].tolist(), storage[2]["x"].item()) == ([0, 1], 5)


@pytest.mark.parametrize("item", ["text", 5, (torch.zeros(1),), {"a": "x"}])
def test_a_state_of_torchrl_cannot_hold_other_objects(item: object) -> None:
    storage = filled("kept")
    with pytest.raises(TypeError, match="can only hold tensors and tensordicts"):
        storage.load_state_dict({"_storage": [item]})
    assert storage[:] == ["kept"]


# Against a plain list ------------------------------------------------------------------------------------

CAPACITY = 6
WRITES = st.lists(
    st.one_of(
        st.tuples(st.integers(-8, 8), st.integers()),
        st.tuples(st.lists(st.integers(-8, 8), max_size=5), st.lists(st.integers(), max_size=5)),
        st.tuples(st.slices(8), st.lists(st.integers(), max_size=5)),
    ),
    max_size=12,
)


def model_write(model: list[int], cursor: object, data: object) -> list[int] | None:
    """Return the list after a write, or None if it is to be refused."""
    rows, values = ([cursor], [data]) if isinstance(cursor, int) else (cursor, data)
    rows = [number + len(model) if number < 0 else number for number in rows]
    if len(rows) != len(values) or any(not 0 <= number < CAPACITY for number in rows):
        return None
    written = dict(enumerate(model)) | dict(zip(rows, values, strict=True))
    return [written[number] for number in range(len(written))] if max(written, default=-1) < len(written) else None


@settings(deadline=None)
@given(WRITES)
def test_like_a_plain_list(writes: list[tuple[object, object]]) -> None:
    storage, model = ListStorage(CAPACITY), []
    for cursor, data in writes:
        if isinstance(cursor, slice):
            if (cursor.step or 1) < 0:
                continue
            ends = (cursor.start or 0, len(model) if cursor.stop is None else cursor.stop)
            low, high = (min(max(end + len(model) if end < 0 else end, 0), CAPACITY) for end in ends)
            after = model_write(model, list(range(low, high, cursor.step or 1)), data)
        else:
            after = model_write(model, cursor, data)
        if after is None:
            with pytest.raises((RuntimeError, IndexError)):
                storage.set(cursor, data)
        else:
            storage.set(cursor, data)
            model = after
        assert storage[:] == model
        assert len(storage) == len(model)


@settings(deadline=None)
@given(st.lists(st.integers(), max_size=6), st.lists(st.integers(-7, 7), max_size=4), st.slices(8))
def test_reads_like_a_plain_list(model: list[int], rows: list[int], part: slice) -> None:
    storage = filled(*model)
    assert storage[part] == model[part]
    if all(-len(model) <= number < len(model) for number in rows):
        assert storage[torch.tensor(rows, dtype=torch.int64)] == [model[number] for number in rows]
    else:
        with pytest.raises(IndexError):
            storage[rows]


def ragged(number: int) -> TensorDict:
    return TensorDict({"a": torch.full((number + 1, 2), float(number))}, [number + 1])


def stacked(rows: int = 5, **options: object) -> LazyStackStorage:
    storage = LazyStackStorage(10, **options)
    storage.set(range(rows), [ragged(number) for number in range(rows)])
    storage.last_cursor = None
    return storage


@pytest.mark.parametrize(
    ("stack_dim", "shape"), [(0, (3, -1)), (1, (-1, 3)), (-1, (-1, 3)), (-2, (3, -1))]
)  # a negative one counts from the end, with the new dimension counted in
def test_ragged_shapes_are_stacked_lazily(stack_dim: int, shape: tuple[int, ...]) -> None:
    found = stacked(stack_dim=stack_dim)[[4, 0, 2]]
    assert type(found) is LazyStackedTensorDict
    assert found.batch_size == shape
    assert [part["a"][0, 0].item() for part in found.tensordicts] == [4, 0, 2]
    for index in (slice(1, 3), torch.tensor([1, 2]), (torch.tensor([1, 2]),), range(1, 3)):
        assert [part["a"].shape[0] for part in stacked(stack_dim=stack_dim)[index].tensordicts] == [2, 3]


def test_an_int_reads_one_element_as_it_is() -> None:
    item, storage = ragged(3), LazyStackStorage(3)
    storage.set(0, item)
    assert storage[0] is item
    assert list(storage) == [item]
    storage.empty()
    storage.set(range(2), [Step(torch.zeros(n), batch_size=[]) for n in (1, 2)])
    assert (type(storage[:]), storage[:].batch_size) == (Step, (2,))


@pytest.mark.parametrize("stack_dim", [0, -1])
def test_a_stack_of_no_rows_keeps_keys_and_shapes(stack_dim: int) -> None:
    found = stacked(stack_dim=stack_dim)[[]]
    assert found["a"].numel() == 0
    assert found.batch_size[stack_dim] == 0
    assert stacked(0)[:].batch_size == (0,)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("text", "a str cannot be stacked lazily, expected a tensordict"),
        (torch.zeros(2), "a Tensor cannot be stacked lazily"),
        (TensorDict({}, []), "tensordicts with 0 and 1 batch dimensions cannot be stacked lazily"),
        (TensorDict({}, [2, 3]), "tensordicts with 1 and 2 batch dimensions"),
    ],
)
def test_elements_that_cannot_be_stacked_are_refused_and_change_nothing(item: object, message: str) -> None:
    storage = stacked(2)
    with pytest.raises(SchemaError, match=message):
        storage.set([0, 1], [ragged(7), item])
    assert storage[0]["a"].shape == (1, 2)
    assert len(storage) == 2


def test_the_stack_dim_is_one_of_the_elements() -> None:
    with pytest.raises(SchemaError, match="tensordicts with 1 batch dimensions cannot be stacked along dimension 2"):
        stacked(stack_dim=2)
    with pytest.raises(UsageError, match="expected an int"):
        LazyStackStorage(3, stack_dim=0.5)


def test_stacked_elements_are_overwritten_until_the_storage_is_emptied() -> None:
    storage = stacked(2, device="meta")
    storage.set([1, 2], LazyStackedTensorDict(ragged(8), ragged(9)))
    assert [part["a"].shape[0] for part in storage[:].tensordicts] == [1, 9, 10]
    assert {part["a"].device.type for part in storage[:].tensordicts} == {"meta"}
    with pytest.raises(RuntimeError, match="row 10 cannot be written"):
        storage.set(10, ragged(0))
    storage.empty()
    storage.set(0, TensorDict({"b": torch.zeros(2)}, []))  # of other dimensions
    assert storage[:].batch_size == (1,)


def test_a_state_keeps_batch_sizes() -> None:
    storage, other = stacked(), stacked(1)
    other.load_state_dict(storage.state_dict())
    assert [part.batch_size for part in other[:].tensordicts] == [(n,) for n in range(1, 6)]
    other[0]["a"].fill_(9)
    assert storage[0]["a"].tolist() == [[0, 0]]


def test_a_state_of_other_things_changes_nothing() -> None:
    storage = stacked(2)
    with pytest.raises(SchemaError, match="a Tensor cannot be stacked"):
        storage.load_state_dict({"_storage": [torch.zeros(2)]})
    with pytest.raises(SchemaError, match="batch dimensions cannot be stacked"):
        storage.load_state_dict({"_storage": [ragged(1).state_dict(), NonTensorData("x").state_dict()]})
    assert len(storage) == 2


@pytest.mark.parametrize("index", [slice(None), [0, 1, 1]])
def test_batches_share_tensors_with_the_elements_but_no_entries(index: object) -> None:
    storage = stacked(2)
    batch = storage[index]
    batch.tensordicts[1]["b"] = torch.zeros(2)
    assert set(storage[1].keys()) == {"a"}
    assert all("b" not in part for place, part in enumerate(batch.tensordicts) if place != 1)
    batch.tensordicts[1]["a"].fill_(7)
    assert storage[1]["a"].eq(7).all()


class OfLists(StorageFillTests):
    kinds = ("tensor", "tensordict", "nested tensordict")
    ndims = (1,)
    alike = False
    kind: ClassVar[Callable[[int], ListStorage]] = ListStorage

    def make_empty(self, max_size: int, ndim: int) -> ListStorage:
        return type(self).kind(max_size)

    def read(self, storage: ListStorage, rows: list[int] | None = None) -> Any:
        return torch.stack(super().read(storage, rows))


@in_loops
class TestListStorage(OfLists):
    pass


@in_loops
class TestCompressedListStorage(OfLists):
    kind = CompressedListStorage


@in_loops
class TestCompressedByZlib(OfLists):
    kind = partial(CompressedListStorage, codec="zlib")


@in_loops
class TestLazyStackStorage(OfLists):
    kinds = ("tensordict", "nested tensordict")
    kind = LazyStackStorage

    def read(self, storage: LazyStackStorage, rows: list[int] | None = None) -> TensorDict:
        return StorageFillTests.read(self, storage, rows).contiguous()


CODECS = ("zstd", "zlib")


def by_zlib(tensor: torch.Tensor) -> torch.Tensor:
    return torch.frombuffer(bytearray(zlib.compress(tensor.numpy().tobytes())), dtype=torch.uint8)


def undo_zlib(data: torch.Tensor, about: dict) -> torch.Tensor:
    raw = bytearray(zlib.decompress(data.numpy().tobytes()))
    return torch.frombuffer(raw, dtype=about["dtype"]).reshape(about["shape"]).to(about["device"])


CUSTOM = {"compression_fn": by_zlib, "decompression_fn": undo_zlib}


def compressed(*items: object, **options: object) -> CompressedListStorage:
    storage = CompressedListStorage(20, **options)
    storage.set(range(len(items)), list(items))
    storage.last_cursor = None
    return storage


def step(number: int) -> TensorDict:
    inner = TensorDict({"b": torch.full((3,), float(number)), "deep": {"c": torch.tensor(number)}}, [])
    return TensorDict({"a": torch.arange(6).reshape(3, 2) + number, "next": inner}, [])


@each("codec", CODECS)
def test_elements_of_any_layout_are_compressed_copies(codec: str) -> None:
    item = torch.arange(6).view(3, 2)[1:2, 1]
    storage = compressed(item, torch.tensor([1 + 2j]).conj(), torch.ones(2, requires_grad=True), codec=codec)
    item.fill_(7)
    assert storage[0].tolist() == [3]
    storage[0].fill_(7)
    assert [one.tolist() for one in storage] == [[3], [1 - 2j], [1, 1]]


@each("codec", CODECS)
@each(
    "dtype",
    [
        torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int32, torch.uint64, torch.float16, torch.bfloat16,
        torch.float64, torch.complex64, torch.float8_e4m3fn,
    ],
)  # fmt: skip
def test_every_element_type_comes_back(codec: str, dtype: torch.dtype) -> None:
    data = (torch.arange(24) % 7).float().to(dtype).reshape(2, 3, 4)
    for tensor in (data, data.mT, data[0, 0, 0], data[:, :0]):
        found = compressed(tensor, codec=codec)[0]
        assert (found.dtype, found.shape) == (dtype, tensor.shape)
        assert found.flatten().tolist() == tensor.flatten().tolist()


@pytest.mark.parametrize("codec", CODECS)
def test_nested_tensordicts_are_compressed_and_keep_their_batch_size(codec: str) -> None:
    entries = {"a": torch.zeros(4, 1000), "n": {"b": torch.zeros(4, 1000)}, "s": list("wxyz")}
    item = TensorDict(entries, [4], device="cpu")
    storage = compressed(item, codec=codec)
    found = storage[0]
    assert storage.bytes() < 200
    assert (found.batch_size, found["n"].batch_size, found.device.type) == ((4,), (4,), "cpu")
    assert found["s"] == list("wxyz")
    assert found["n", "b"].shape == (4, 1000)


def test_the_default_codec_is_zstd_on_every_python() -> None:
    assert compressed(torch.zeros(2)).codec == "zstd"
    assert compressed(torch.zeros(2)).state_dict()["_storage"][0][:4].tolist() == [0x28, 0xB5, 0x2F, 0xFD]


def test_the_length_is_not_counted_item_by_item() -> None:
    storage = compressed(*range(10))
    storage._items = type("Counted", (list,), {"__iter__": lambda self: pytest.fail("counted")})(storage._items)
    assert len(storage) == 10


# Custom functions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("found", "message"), [(b"ab", "a bytes"), (torch.zeros(2).to_sparse(), "a torch.sparse_coo")])
def test_a_function_that_gives_no_dense_tensor_is_refused(found: object, message: str) -> None:
    storage = CompressedListStorage(3, compression_fn=lambda _: found)
    with pytest.raises(SchemaError, match=f"compression_fn returned {message}"):
        storage.set(0, torch.zeros(2))
    assert len(storage) == 0


@pytest.mark.parametrize("way", ["state", "folder"])
@pytest.mark.parametrize(
    ("pack", "unpack"),
    [
        (torch.clone, torch.clone),
        (torch.Tensor.half, torch.Tensor.float),
        (lambda tensor: tensor[None].bfloat16(), lambda tensor: tensor[0].float()),
        (lambda tensor: tensor.sum(), lambda tensor: torch.full((3, 4), tensor.item() / 12)),
        (lambda tensor: tensor.new_empty(0, 2), lambda tensor: torch.ones(3, 4)),
    ],
)
def test_a_function_may_return_any_tensor(pack: Any, unpack: Any, way: str, tmp_path: Path) -> None:
    given: list[tuple[torch.Tensor, dict[str, Any]]] = []

    def noted(data: torch.Tensor, about: dict[str, Any]) -> torch.Tensor:
        given.append((data, about))
        return unpack(data)

    storage, other = (CompressedListStorage(3, compression_fn=pack, decompression_fn=noted) for _ in range(2))
    item = torch.ones(3, 4)
    storage.set(0, TensorDict({"a": item}))
    if way == "state":
        other.load_state_dict(storage.state_dict())
    else:
        storage.dumps(tmp_path)
        other.loads(tmp_path)
    assert torch.equal(other[0]["a"], item)
    ((data, about),) = given
    assert (data.dtype, data.shape) == (pack(item).dtype, pack(item).shape)
    expected = {"type": "tensor", "shape": item.shape, "dtype": item.dtype, "device": torch.device("cpu")}
    assert about == expected


def test_a_function_that_fails_changes_nothing() -> None:
    def picky(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.sum() > 3:
            raise ArithmeticError
        return by_zlib(tensor)

    storage = CompressedListStorage(9, compression_fn=picky, decompression_fn=undo_zlib)
    storage.set(0, torch.ones(1))
    with pytest.raises(ArithmeticError):
        storage.set([0, 1], [torch.zeros(1), torch.full((1,), 9.0)])
    assert [item.tolist() for item in storage] == [[1]]


def test_functions_that_return_views_share_no_memory_with_the_storage() -> None:
    pack, unpack = (lambda tensor: tensor.view(torch.uint8)), (lambda data, _: data.view(torch.float32))
    storage, item = CompressedListStorage(3, compression_fn=pack, decompression_fn=unpack), torch.ones(2)
    storage.set(0, item)
    item.zero_()
    storage[0].zero_()
    assert storage[0].tolist() == [1, 1]


def test_compressed_bytes_need_the_function_that_undoes_them() -> None:
    with pytest.raises(UsageError, match="no decompression_fn"):
        compressed(torch.zeros(2), compression_fn=by_zlib)[0]
    storage = compressed(step(3), **CUSTOM)
    assert storage[0]["next", "deep", "c"].item() == 3
    assert storage.bytes() == sum(len(data) for data in storage.state_dict()["_storage"][0].values())
    with pytest.raises(UsageError, match="no decompression_fn"):
        CompressedListStorage(3).load_state_dict(storage.state_dict())


# Arguments and helpers -----------------------------------------------------------------------------------


@each(
    ("options", "message"),
    [
        ({"codec": "lz4"}, "the codec 'lz4' is unknown; known: zlib, zstd"),
        ({"codec": "zlib", "compression_level": 10}, "zlib has no compression level 10, only -1 to 9"),
        ({"compression_level": 23}, "zstd has no compression level 23"),
    ],
)
def test_unknown_codecs_and_levels_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        CompressedListStorage(3, **options)


def test_a_higher_level_compresses_better() -> None:
    data = torch.arange(20000) ** 2 % 977
    assert compressed(data, compression_level=19).bytes() < compressed(data, compression_level=1).bytes() < data.nbytes


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8).T, b"\1\3\2\4"),
        (np.array([1, 258], dtype=">u2"), b"\0\1\1\2"),
        (b"ab", b"ab"),
        (bytearray(b"ab"), b"ab"),
    ],
)
def test_to_bytestream_takes_arrays_and_bytes(data: object, expected: bytes) -> None:
    assert CompressedListStorage(1).to_bytestream(data_to_bytestream=data) == expected
    for other in ("text", [1], object(), np.array([object()])):
        with pytest.raises(TypeError, match="cannot be converted to bytes"):
            CompressedListStorage.to_bytestream(other)


# State ---------------------------------------------------------------------------------------------------


def test_a_state_keeps_codecs_and_is_not_changed_by_later_writes() -> None:
    storage, other = compressed(step(1), torch.ones(2), "x", codec="zlib"), compressed(torch.zeros(1))
    state = storage.state_dict()
    storage[1] = torch.zeros(5)
    other.load_state_dict(state)
    assert (other[1].tolist(), other[2], other[0]["next", "b"].tolist()) == ([1, 1], "x", [1, 1, 1])
    state["_storage"][1].zero_()
    assert other[1].tolist() == [1, 1]
    other.set(3, torch.ones(1))
    assert [about.get("codec") for about in other.state_dict()["_metadata"]] == [None, "zlib", None, "zstd"]


def test_the_codec_of_a_state_of_torchrl_is_found_from_its_bytes() -> None:
    about = {"type": "tensor", "shape": torch.Size([2]), "dtype": torch.int64, "device": torch.device("cpu")}
    packed = by_zlib(torch.tensor([5, 6]))
    other = CompressedListStorage(5)
    other.load_state_dict({
        "_storage": [packed, {"a": packed}, 7],
        "_metadata": [about, {"type": "tensordict", "fields": {"a": about}}, {"type": "other", "value": 7}],
    })  # fmt: skip
    assert (other[0].tolist(), other[1]["a"].tolist(), other[2]) == ([5, 6], [5, 6], 7)


def broken(change: dict[str, object]) -> dict[str, object]:
    state = compressed(torch.zeros(2)).state_dict()
    return {"_storage": state["_storage"], "_metadata": [state["_metadata"][0] | change]}


ABOUT = {"type": "tensor", "shape": [1], "dtype": "torch.int64"}
ZEROS = {"_storage": [torch.zeros(9).byte()], "_metadata": [ABOUT]}


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        (compressed(*range(20)).state_dict(), SchemaError, "20 objects do not fit: this storage has room for 5"),
        ({"_storage": [1], "_metadata": []}, SchemaError, "holds 1 objects, but describes 0"),
        ({"_storage": [1], "_metadata": [{"type": "tensor"}]}, SchemaError, "describes a tensor ''"),
        ({"_storage": [1], "_metadata": ["x"]}, FormatError, "described by 'x', expected an object"),
        ({"_storage": [1], "_metadata": [{"type": "pickle"}]}, FormatError, "'pickle' is not a known kind of item"),
        (broken({"codec": "lz4"}), FormatError, "codec 'lz4' is unknown"),
        (broken({"dtype": "torch.load"}), FormatError, "'torch.load' is not an element type"),
        (broken({"dtype": "__import__('os')"}), FormatError, "is not an element type"),
        (broken({"shape": [-1]}), FormatError, "is not a shape"),
        (broken({"shape": [True]}), FormatError, "is not a shape"),
        (broken({"shape": [2**61]}), FormatError, "is not the shape of a possible tensor"),
        (broken({"shape": [2**40]}), CorruptDataError, "cannot hold the 4,398,046,511,104 expected"),
        (ZEROS, FormatError, "begin neither like zlib nor like zstd"),
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
def test_damaged_bytes_are_found_when_read(codec: str, damage: str) -> None:
    state = compressed(torch.arange(300), codec=codec).state_dict()
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
