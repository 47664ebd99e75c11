from __future__ import annotations

import multiprocessing
import pickle
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, TensorDict, tensorclass

from rbtool.core.errors import SchemaError, UsageError
from rbtool.core.storages.list_storage import ListStorage
from rbtool.core.testing.storages import StorageTests

Pair = namedtuple("Pair", ["left", "right"])


@tensorclass
class Step:
    observation: torch.Tensor
    text: str = ""


def row(number: int) -> TensorDict:
    inner = {"observation": torch.full((3,), float(number)), "reward": torch.tensor([number / 2])}
    return TensorDict({"action": torch.tensor(number), "next": inner}, [])


def filled(*items: object, max_size: int | None = 10) -> ListStorage:
    storage = ListStorage(max_size)
    storage.set(range(len(items)), list(items))
    storage.last_cursor = None
    return storage


class TestOfTensors(StorageTests):
    def make(self) -> ListStorage:
        return filled(*torch.arange(20).reshape(10, 2))


class TestOfTensorDicts(StorageTests):
    def make(self) -> ListStorage:
        return filled(*map(row, range(10)), max_size=None)


class TestOfTrees(StorageTests):
    def make(self) -> ListStorage:
        return filled(*({"a": torch.tensor(n), "b": [torch.ones(n), (torch.zeros(2, n),)]} for n in range(10)))


class TestPartlyFilled(StorageTests):
    def make(self) -> ListStorage:
        return filled(*torch.arange(20).reshape(10, 2), max_size=25)


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
    ],
)  # fmt: skip
def test_several_rows_are_written_one_by_one(data: object) -> None:
    storage = filled(0, 1, 2)
    storage.set([2, 1], data)
    assert [int(item["a"] if isinstance(item, TensorDict) else item) for item in storage] == [0, 6, 5]


def test_a_tensorclass_is_taken_row_by_row() -> None:
    storage = ListStorage(3)
    storage.set(range(2), Step(torch.arange(2), batch_size=[2]))
    assert [int(item.observation) for item in storage] == [0, 1]
    assert type(storage[0]) is Step


@pytest.mark.parametrize(
    "data", ["ab", {"a": [1, 2]}, 3, torch.tensor(1), np.array(2), TensorDict({}, []), iter([1, 2])]
)
def test_what_has_no_rows_is_a_type_error(data: object) -> None:
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
        ([0, 1], [1], "1 objects given for 2 rows"),
        (slice(0, 2), torch.zeros(3), "3 objects given for 2 rows"),
        ((1, 2), 1, "2 coordinates given; a list has one dimension"),
        (((1, 2),), 1, "2 coordinates given"),
    ],
)
def test_a_refused_write_is_a_runtime_error_and_changes_nothing(cursor: object, data: object, message: str) -> None:
    storage = filled(*"abcde")
    before = storage.log.now
    with pytest.raises(RuntimeError, match=message):
        storage.set(cursor, data)
    assert (storage[:], storage.last_cursor, storage.log.now) == (list("abcde"), None, before)


@pytest.mark.parametrize("index", [5, -6, [0, 5], torch.tensor([7]), np.array([-6]), torch.tensor(5), range(4, 7)])
def test_rows_that_are_not_there(index: object) -> None:
    with pytest.raises(IndexError, match=r"row is -?\d, expected one of 5"):
        filled(*"abcde")[index]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (torch.zeros(2, 2, dtype=torch.int64), "found one of shape"),
        ([0.5], "named by whole numbers"),
        ("a", "found the type str"),
        ({"a": 1}, "found the type dict"),
        (True, "a mask of 0 dimensions"),
        (torch.tensor([True, False]), "the mask is for 2 rows, expected 5"),
    ],
)
def test_what_names_no_rows(index: object, message: str) -> None:
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
def test_indices(index: object, expected: object) -> None:
    assert filled(*"abcde")[index] == expected


def test_a_mask_says_where_to_write() -> None:
    storage = filled(*"abc")
    storage[torch.tensor([True, False, True])] = ["x", "y"]
    assert storage[:] == ["x", "b", "y"]


def test_fresh_rows_may_come_in_any_order() -> None:
    storage = filled(*"ab")
    storage.set([4, 0, 2, 3], list("EACD"))
    assert storage[:] == list("AbCDE")


def test_later_rows_win_where_a_cursor_repeats() -> None:
    storage = ListStorage(10)
    storage.set(torch.arange(25) % 10, range(25))
    assert storage[:] == [20, 21, 22, 23, 24, 15, 16, 17, 18, 19]


def test_sharp_edge_12_the_cursor_is_remembered() -> None:
    storage = ListStorage(10)
    storage.set(range(3), ["a", "b", "c"])
    assert storage.last_cursor == range(3)
    storage[0] = "x"
    assert storage.last_cursor == range(3)


def test_there_is_room_for_more_than_32_bits_count() -> None:
    assert ListStorage().max_size == 2**63 - 1
    with pytest.raises(UsageError, match="expected a number from 1"):
        ListStorage(0)


def test_the_device_moves_tensors_wherever_they_are() -> None:
    storage = ListStorage(10, device="meta")
    storage.set(range(2), [{"a": (torch.zeros(2), [row(1)]), "b": Pair(torch.ones(1), "x")}, "text"])
    found = storage[0]
    assert {found["a"][0].device.type, found["a"][1][0].device.type, found["b"].left.device.type} == {"meta"}
    assert (found["b"].right, storage[1]) == ("x", "text")


def test_sharing_across_spawn_is_refused() -> None:
    child = multiprocessing.get_context("spawn").Process(target=print, args=(filled("a"),))
    with pytest.raises(RuntimeError, match="a ListStorage cannot be shared with a spawned process"):
        child.start()


def test_pickled_whole() -> None:
    storage = filled("a", {"b": torch.arange(3)})
    other = pickle.loads(pickle.dumps(storage))
    assert other[0] == "a"
    assert other[1]["b"].tolist() == [0, 1, 2]


# State -------------------------------------------------------------------------------------------------


def odd_items() -> list[object]:
    nested = TensorDict({"a": torch.arange(6).reshape(3, 2), "n": {"b": torch.ones(3)}, "s": "hey"}, [3], device="cpu")
    lazy = LazyStackedTensorDict(TensorDict({"u": torch.ones(1)}), TensorDict({"u": torch.ones(2)}))
    nests = [{"a": (torch.ones(2), [1, None])}, Pair(torch.ones(1), 2), {1: torch.ones(1)}]
    numbers = [np.arange(3), np.int16(4), float("inf")]
    return [nested, lazy, torch.tensor(3), "text", None, *nests, *numbers, Step(torch.zeros(3), "hi", batch_size=[3])]


def test_every_kind_of_item_comes_back_from_a_state() -> None:
    storage, other = filled(*odd_items(), max_size=20), filled("old")
    other.max_size = 20
    other.load_state_dict(storage.state_dict())
    nested, lazy, *rest = other[:]
    assert (nested.batch_size, nested["n"].batch_size, nested["s"], nested.device.type) == ((3,), (3,), "hey", "cpu")
    assert [part["u"].shape[0] for part in lazy.tensordicts] == [1, 2]
    assert repr(rest) == repr(odd_items()[2:])
    assert [type(item) for item in rest] == [type(item) for item in odd_items()[2:]]


def test_a_state_does_not_follow_the_storage() -> None:
    storage = filled(torch.zeros(2), row(1))
    state = storage.state_dict()
    storage[0] = torch.ones(2)
    other = ListStorage(5)
    other.load_state_dict(state)
    assert other[0].tolist() == [0, 0]


def test_what_was_loaded_shares_no_memory() -> None:
    storage, other = filled(torch.zeros(2), row(1)), ListStorage(5)
    other.load_state_dict(storage.state_dict())
    other[0].fill_(7)
    other[1]["next", "observation"].fill_(7)
    assert storage[0].tolist() == [0, 0]
    assert storage[1]["next", "observation"].tolist() == [1, 1, 1]


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    storage = filled("a", max_size=2)
    with pytest.raises(SchemaError, match="3 objects are to be loaded; this storage has room for 2"):
        storage.load_state_dict(filled(*"xyz").state_dict())
    state = filled(torch.zeros(1), {"a": torch.zeros(1)}).state_dict()
    for broken, message in (
        (state | {"_metadata": state["_metadata"][:1]}, "holds 2 objects and describes 1"),
        (state | {"_storage": [torch.zeros(1), {}]}, "the state has no tensor 'a', but describes one"),
    ):
        with pytest.raises(SchemaError, match=message):
            storage.load_state_dict(broken)
    assert storage[:] == ["a"]


def test_keys_that_dots_make_alike_are_refused() -> None:
    storage = filled({"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}})
    with pytest.raises(SchemaError, match="written alike with dots"):
        storage.state_dict()


def test_a_state_of_torchrl_keeps_batch_sizes() -> None:
    item = TensorDict({"a": torch.zeros(3, 2), "n": TensorDict({"b": torch.ones(3)}, [3]), "s": "hey"}, [3])
    storage = ListStorage(5)
    storage.load_state_dict({"_storage": [item.state_dict(), torch.arange(2), OrderedDict(x=torch.tensor(5))]})
    found = storage[0]
    assert (found.batch_size, found["n"].batch_size, found["s"]) == ((3,), (3,), "hey")
    assert found["n", "b"].tolist() == [1, 1, 1]
    assert (storage[1].tolist(), storage[2]["x"].item()) == ([0, 1], 5)


@pytest.mark.parametrize("item", ["text", 5, (torch.zeros(1),), {"a": "x"}])
def test_a_state_of_torchrl_says_nothing_of_other_objects(item: object) -> None:
    storage = filled("kept")
    with pytest.raises(TypeError, match="holds tensors and tensordicts"):
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
