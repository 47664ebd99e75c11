from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

import rbtool
from rbtool import LazyMemmapStorage, LazyTensorStorage, ListStorage, QueryModule, TensorDictMap


def keys_of(numbers: list[int]) -> TensorDict:
    """Make keys of two entries, so that every number has its own."""
    found = torch.tensor(numbers, dtype=torch.int64)
    return TensorDict(state=torch.stack([found // 3, -found], -1).float(), action=found % 3, batch_size=len(numbers))


def values_of(numbers: list[float]) -> TensorDict:
    found = torch.tensor(numbers, dtype=torch.float32)
    return TensorDict(reward=found[:, None], next={"state": found.expand(2, -1).T.clone()}, batch_size=len(numbers))


def colliding(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(x), dtype=torch.int64)


def made(**options: Any) -> TensorDictMap:
    return TensorDictMap.from_tensordict_pair(keys_of([0]), values_of([0]), in_keys=["state", "action"], **options)


def by_key(**options: Any) -> TensorDictMap:
    query = QueryModule(in_keys=["state", "action"])
    storage = {"reward": LazyTensorStorage(50), ("next", "state"): LazyMemmapStorage(50)}
    return TensorDictMap(query_module=query, storage=storage, **options)


MAPS = {
    "growing": made,
    "colliding": lambda: made(hash_module=colliding),
    "list": lambda: made(storage_constructor=ListStorage),
    "memmap": lambda: made(storage_constructor=lambda: LazyMemmapStorage(50)),
    "consolidated": lambda: made(consolidated=True),
    "by key": by_key,
}


def test_the_example_of_the_reference() -> None:
    query_module = QueryModule(in_keys=["key1", "key2"], index_key="index")
    embedding_storage = LazyTensorStorage(1000)
    tensor_dict_storage = TensorDictMap(query_module=query_module, storage={"out": embedding_storage})
    key1, key2 = torch.Tensor([[-1], [1], [3], [-3]]), torch.Tensor([[0], [2], [4], [-4]])
    index = TensorDict({"key1": key1, "key2": key2}, batch_size=(4,))
    value = TensorDict({"out": torch.Tensor([[10], [20], [30], [40]])}, batch_size=(4,))
    tensor_dict_storage[index] = value
    assert tensor_dict_storage[index].keys() == {"out"}
    assert torch.sum(tensor_dict_storage.contains(index)).item() == 4
    new_index = index.clone(True)
    new_index["key3"] = torch.Tensor([[4], [5], [6], [7]])
    retrieve_value = tensor_dict_storage[new_index]
    assert (retrieve_value["out"] == value["out"]).all()


operations = st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 30), min_size=1, max_size=12)), max_size=10)


@pytest.mark.parametrize("name", MAPS)
@settings(max_examples=25)
@given(operations=operations)
def test_a_map_does_what_a_dict_does(name: str, operations: list[tuple[bool, list[int]]]) -> None:
    found, oracle, value = MAPS[name](), {}, 0.0
    for writes, numbers in operations:
        if writes:
            given_values = [value + place for place in range(len(numbers))]
            value += len(numbers)
            found[keys_of(numbers)] = values_of(given_values)
            oracle.update(zip(numbers, given_values, strict=True))
        known = [number in oracle for number in numbers]
        assert found.contains(keys_of(numbers)).tolist() == known
        assert (keys_of(numbers) in found) == all(known)
        there = [number for number in numbers if number in oracle]
        if there:
            expected = values_of([oracle[number] for number in there])
            assert (found[keys_of(there)] == expected).all()
        if not all(known):
            with pytest.raises(KeyError, match=f"{known.count(False)} of {len(known)} keys are not in the map"):
                found[keys_of(numbers)]
        assert len(found) == len(oracle)


@pytest.mark.parametrize("name", MAPS)
def test_single_keys_and_batches_of_several_dimensions(name: str) -> None:
    found, keys, values = MAPS[name](), keys_of([*range(6)]), values_of([*range(6)])
    found[keys.reshape(2, 3)] = values.reshape(2, 3)
    assert found[keys[4]].batch_size == ()
    assert found[keys[4]]["reward"].item() == 4
    assert found.contains(keys[4]).shape == ()
    assert found[keys.reshape(3, 2)]["next", "state"].equal(values["next", "state"].reshape(3, 2, 2))
    assert found(keys[4])["reward"].item() == 4
    found[keys[4]] = values[1]
    assert (len(found), found[keys[4]]["reward"].item()) == (6, 1)


def test_numbers_are_written_into_keys_and_read_rows() -> None:
    found, keys = made(), keys_of([5, 7, 5])
    found[keys] = values_of([1, 2, 3])
    assert keys["_index"].tolist() == [0, 1, 0]
    assert keys["_hash"][0] == keys["_hash"][2]
    assert found[keys["_index"]]["reward"][:, 0].tolist() == [3, 2, 3]
    assert found[torch.tensor([[1], [0]])]["reward"].shape == (2, 1, 1)
    assert found[1]["reward"].item() == 2
    assert found[:]["reward"][:, 0].tolist() == [3, 2]
    asked = keys_of([5])
    assert found[asked].keys() == {"reward", "next"}
    assert asked.keys() == {"state", "action"}


def test_locked_keys_stay_as_they_are() -> None:
    found, keys = made(), keys_of([5]).lock_()
    found[keys] = values_of([1])
    assert "_index" not in keys
    assert keys in found


@pytest.mark.parametrize("index", [2, -3, [0, 5], torch.tensor([7])])
def test_rows_that_are_not_there(index: Any) -> None:
    found = made()
    with pytest.raises(IndexError, match="one of 0 rows"):
        found[index]
    found[keys_of([0, 1])] = values_of([0, 1])
    with pytest.raises(IndexError, match="one of 2 rows"):
        found[index]


@pytest.mark.parametrize("index", [True, 0.5, None, "text"])
def test_rows_that_are_no_numbers(index: Any) -> None:
    found = made()
    found[keys_of([0, 1])] = values_of([0, 1])
    with pytest.raises(IndexError, match=r"by whole numbers, slices or masks|a mask of 0 dimensions"):
        found[index]


def test_values_that_were_read_are_copies() -> None:
    found = made()
    found[keys_of([1])] = values_of([1])
    found[keys_of([1])]["reward"].zero_()
    found[keys_of([1])[0]]["reward"].zero_()
    assert found[keys_of([1])]["reward"].item() == 1


def test_a_map_without_a_bound_grows() -> None:
    found = made()
    for start in range(0, 9000, 900):
        numbers = [*range(start, start + 900)]
        found[keys_of(numbers)] = values_of(numbers)
    assert (len(found), found.max_size) == (9000, None)
    assert found[keys_of([0, 8999, 4000])]["reward"][:, 0].tolist() == [0, 8999, 4000]


@pytest.mark.parametrize("make", [lambda: made(max_size=4), lambda: made(storage_constructor=lambda: ListStorage(4))])
def test_more_keys_than_there_is_room_for(make: Any) -> None:
    found = make()
    found[keys_of([0, 1, 2])] = values_of([0, 1, 2])
    with pytest.raises(rbtool.SchemaError, match="there are 5 different keys, expected at most 4"):
        found[keys_of([2, 8, 9])] = values_of([7, 8, 9])
    assert (len(found), found.max_size, found.contains(keys_of([8, 9])).any()) == (3, 4, False)
    assert found[keys_of([2])]["reward"].item() == 2
    found[keys_of([9, 2])] = values_of([9, 7])
    assert found[keys_of([2, 9])]["reward"][:, 0].tolist() == [7, 9]


@pytest.mark.parametrize("name", [name for name in MAPS if name != "list"])
@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda values: values.set(("next", "state"), torch.zeros(3, 5)), rbtool.SchemaError),
        (lambda values: values.set("reward", torch.zeros(3, 2)), rbtool.SchemaError),
        (lambda values: values.del_("reward"), rbtool.MissingKeyError),
        (lambda values: values[:2], rbtool.SchemaError),
        (lambda values: values["reward"], rbtool.SchemaError),
    ],
    ids=["other shape", "other shape of the first", "no entry", "fewer", "no tensordict"],
)
def test_values_that_do_not_fit_change_nothing(name: str, change: Any, kind: type[Exception]) -> None:
    found = MAPS[name]()
    found[keys_of([1, 2])] = values_of([1, 2])
    given_keys = keys_of([2, 3, 4])
    with pytest.raises(kind):
        found[given_keys] = change(values_of([7, 8, 9]))
    assert found[keys_of([1, 2])]["reward"][:, 0].tolist() == [1, 2]
    assert (len(found), "_index" in given_keys) == (2, False)
    assert not found.contains(keys_of([3, 4])).any()


# Merging -------------------------------------------------------------------------------------------


def added(new: TensorDict, old: TensorDict | None = None) -> TensorDict:
    return new if old is None else new.apply(torch.add, old)


@pytest.mark.parametrize("batches", [[[1, 2, 1, 1]], [[1], [2, 1], [1]]])
def test_values_are_merged_with_those_that_are_there(batches: list[list[int]]) -> None:
    found = made(write_fn=added)
    for numbers in batches:
        found[keys_of(numbers)] = values_of([1] * len(numbers))
    assert found[keys_of([1, 2])]["reward"][:, 0].tolist() == [3, 1]


def test_out_keys_choose_what_is_stored() -> None:
    found = made(out_keys=["reward"])
    found[keys_of([1])] = values_of([4])
    assert found[keys_of([1])].keys() == {"reward"}
    assert found.out_keys == ["reward"]


def test_objects_are_collated() -> None:
    query = QueryModule(in_keys=["state", "action"])
    found = TensorDictMap(
        query_module=query, storage={"reward": ListStorage(9)}, collate_fn=lambda rows: sum(rows)[None]
    )
    found[keys_of([1, 2])] = values_of([4, 5])
    assert found[keys_of([1])]["reward"].tolist() == [[4]]


# Queries from elsewhere, and state -----------------------------------------------------------------


@pytest.mark.parametrize("name", MAPS)
def test_keys_that_a_query_numbered_have_no_value(name: str) -> None:
    found = MAPS[name]()
    found.query_module(keys_of([1, 2, 3]))
    assert not found.contains(keys_of([1, 2, 3])).any()
    found[keys_of([3])] = values_of([30])
    assert found.contains(keys_of([1, 2, 3])).tolist() == [False, False, True]
    assert (len(found), found[keys_of([3])]["reward"].item()) == (1, 30)
    with pytest.raises(KeyError):
        found[keys_of([1])]
    with pytest.raises(IndexError):
        found[0]
    found[keys_of([1, 9])] = values_of([10, 90])
    assert found[keys_of([9, 1, 3])]["reward"][:, 0].tolist() == [90, 10, 30]


@pytest.mark.parametrize("name", MAPS)
def test_a_cleared_map_takes_other_keys(name: str) -> None:
    found = MAPS[name]()
    found[keys_of([1, 2])] = values_of([1, 2])
    found.clear()
    assert (len(found), found.contains(keys_of([1])).any()) == (0, False)
    found[keys_of([2])] = values_of([5])
    assert (len(found), found[keys_of([2])]["reward"].item()) == (1, 5)


def test_a_map_is_saved_and_loaded() -> None:
    found, other, file = made(), made(), io.BytesIO()
    numbers = [*range(3000)]
    found[keys_of(numbers)] = values_of(numbers)
    torch.save(found.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert (len(other), other[keys_of([2999, 5])]["reward"][:, 0].tolist()) == (3000, [2999, 5])
    other[keys_of([3000, 5])] = values_of([1, 2])
    assert other[keys_of([3000, 5])]["reward"][:, 0].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"storage": {}}, rbtool.UsageError, "a dict of storages by out key"),
        ({"storage": [1]}, rbtool.UsageError, "a dict of storages by out key"),
        ({"storage": {"a": ListStorage(3)}, "out_keys": ["b"]}, rbtool.UsageError, "out_keys are"),
    ],
)
def test_maps_of_nonsense(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        TensorDictMap(query_module=QueryModule(in_keys=["state"]), **options)


@pytest.mark.parametrize("keys", [{"in_keys": ["staet"]}, {"in_keys": ["state"], "out_keys": ["other"]}])
def test_pairs_without_the_keys(keys: dict[str, Any]) -> None:
    with pytest.raises(rbtool.MissingKeyError):
        TensorDictMap.from_tensordict_pair(keys_of([0]), values_of([0]), **keys)
