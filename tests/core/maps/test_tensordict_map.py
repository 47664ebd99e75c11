"""QueryModule and TensorDictMap."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pretend_cuda import GPU, Pretended, pretended_gpu
from tensordict import TensorDict

import rbtool
from rbtool import (
    HashToInt,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    QueryModule,
    RandomProjectionHash,
    SipHash,
    TensorDictMap,
)


def pairs(*rows: tuple[float, int]) -> TensorDict:
    state, goal = zip(*rows, strict=True)
    return TensorDict(state=torch.tensor(state)[:, None], goal=torch.tensor(goal), batch_size=len(rows))


def constant(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(x), dtype=torch.int64)


def test_queries_do_the_example_of_the_reference() -> None:
    query_module = QueryModule(in_keys=["key1", "key2"], index_key="index", hash_module=SipHash())
    key1, key2 = torch.tensor([[1.0], [1], [1], [2]]), torch.tensor([[3.0], [3], [2], [3]])
    query = TensorDict({"key1": key1, "key2": key2, "other": torch.randn(4)}, batch_size=(4,))
    res = query_module(query)
    assert res["index"][0] == res["index"][1]
    assert res["index"][1] != res["index"][2]
    assert res["index"][2] != res["index"][3]


@pytest.mark.parametrize(
    "modules",
    [None, constant, [constant, SipHash()], RandomProjectionHash(n_components=1), lambda x: x.sum(-1).round()],
    ids=["default", "constant", "one each", "projection", "floats"],
)
@pytest.mark.parametrize("aggregator", [None, constant])
def test_keys_are_told_apart_whatever_their_hashes(modules: Any, aggregator: Any) -> None:
    query = QueryModule(in_keys=["a", "b"], hash_module=modules, aggregator=aggregator)
    keys = TensorDict(
        a=torch.tensor([[0.0], [1], [0], [1], [0]]), b=torch.tensor([[2], [2], [2], [3], [-2]]), batch_size=5
    )
    assert query(keys)["_index"].tolist() == [0, 1, 0, 2, 3]
    assert query(keys[[4, 1]], extend=False)["_index"].tolist() == [3, 1]


def test_numbers_have_the_batch_size() -> None:
    query = QueryModule(in_keys=["state", ("deep", "goal")])
    keys = TensorDict(
        state=torch.arange(6.0).reshape(2, 3, 1) // 2, deep={"goal": torch.zeros(2, 3)}, batch_size=[2, 3]
    )
    assert query(keys)["_index"].tolist() == [[0, 0, 1], [1, 2, 2]]
    assert query(keys[0, 2].clone(), extend=False)["_index"].tolist() == 1
    assert query(keys[:, :0].clone())["_index"].shape == (2, 0)


def test_what_is_written_and_where() -> None:
    query, keys = QueryModule(in_keys=["state"], index_key="number"), pairs((1, 2))
    assert query(keys, clone=True, write_hash=False).keys() == {"state", "goal", "number"}
    assert keys.keys() == {"state", "goal"}
    assert query(keys) is keys
    assert keys["_hash"].equal(SipHash()(keys["state"]))
    copying = QueryModule(in_keys=["state"], clone=True)
    assert copying(keys) is not keys
    assert (copying.in_keys, copying.out_keys) == (["state"], ["_index", "_hash"])


def test_unknown_keys_raise_and_are_not_added() -> None:
    query = QueryModule(in_keys=["state"])
    query(pairs((1, 0)))
    with pytest.raises(KeyError, match="2 of 3 keys are not in the map, the first of them in row 1"):
        query(pairs((1, 0), (2, 0), (3, 0)), extend=False)
    assert len(query) == 1


def test_modules_share_numbers() -> None:
    numbers = HashToInt()
    first, second = (QueryModule(in_keys=[key], hash_to_int=numbers) for key in ("state", "other"))
    first(pairs((5.0, 0)))
    assert second(TensorDict(other=torch.tensor([[6.0], [5.0]]), batch_size=2))["_index"].tolist() == [1, 0]


def test_a_query_is_saved() -> None:
    query, other = QueryModule(in_keys=["state"]), QueryModule(in_keys=["state"])
    query(pairs((5, 0), (4, 0)))
    other.load_state_dict(query.state_dict())
    assert other(pairs((4, 0), (5, 0)), extend=False)["_index"].tolist() == [1, 0]
    with pytest.raises(rbtool.SchemaError):
        other(TensorDict(state=torch.zeros(1, 2), batch_size=1))


@pytest.mark.parametrize(
    ("keys", "kind", "message"),
    [
        (
            TensorDict(state=torch.zeros(1, 2), batch_size=1),
            rbtool.SchemaError,
            r"'state' is torch.float32 \[2\], expected",
        ),
        (TensorDict(state=torch.zeros(1, 1).double(), batch_size=1), rbtool.SchemaError, "torch.float64"),
        (TensorDict(states=torch.zeros(1, 1), batch_size=1), rbtool.MissingKeyError, "did you mean 'states'"),
        (TensorDict(state="text", batch_size=[]), rbtool.SchemaError, "only entries that are dense tensors"),
        (
            TensorDict(state={"x": torch.zeros(1)}, batch_size=1),
            rbtool.SchemaError,
            "only entries that are dense tensors",
        ),
        (torch.zeros(1, 1), rbtool.UsageError, "expected a tensordict with the keys, found a Tensor"),
    ],
    ids=["shape", "dtype", "missing", "text", "nested", "no tensordict"],
)
def test_keys_that_cannot_be_hashed(keys: Any, kind: type[Exception], message: str) -> None:
    query = QueryModule(in_keys=["state"])
    query(pairs((1, 0)))
    with pytest.raises(kind, match=message):
        query(keys)
    assert len(query) == 1


def keys_of(numbers: list[int]) -> TensorDict:
    """Make keys of two entries, so that every number has its own."""
    found = torch.tensor(numbers, dtype=torch.int64)
    return TensorDict(state=torch.stack([found // 3, -found], -1).float(), action=found % 3, batch_size=len(numbers))


def values_of(numbers: list[float]) -> TensorDict:
    found = torch.tensor(numbers, dtype=torch.float32)
    return TensorDict(reward=found[:, None], next={"state": found.expand(2, -1).T.clone()}, batch_size=len(numbers))


def made(in_keys: Any = ("state", "action"), **options: Any) -> TensorDictMap:
    return TensorDictMap.from_tensordict_pair(keys_of([0]), values_of([0]), in_keys=in_keys, **options)


def by_key(**options: Any) -> TensorDictMap:
    query = QueryModule(in_keys=["state", "action"])
    storage = {"reward": LazyTensorStorage(50), ("next", "state"): LazyMemmapStorage(50)}
    return TensorDictMap(query_module=query, storage=storage, **options)


MAPS = {
    "growing": made,
    "colliding": lambda: made(hash_module=constant),
    "list": lambda: made(storage_constructor=ListStorage),
    "memmap": lambda: made(storage_constructor=lambda: LazyMemmapStorage(50)),
    "consolidated": lambda: made(consolidated=True),
    "by key": by_key,
}


def test_maps_do_the_example_of_the_reference() -> None:
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


def test_out_keys_that_values_lack() -> None:
    keys, values = keys_of([0, 1]), values_of([0, 1])
    numbered, found = made(), made(out_keys=["_index", "other"])
    for written in (values, values.exclude("reward", "next")):
        with pytest.raises(KeyError, match="no entry '_index'"):
            found[keys.clone()] = written
    numbered[keys] = values  # writes `_index` into the keys
    found[keys] = keys
    assert found[keys]["_index"].tolist() == keys["_index"].tolist() == [0, 1]
    assert (found.out_keys, "other" in found[keys]) == (["_index", "other"], False)
    with pytest.raises(KeyError):
        found[keys]["other"]
    with pytest.raises(RuntimeError):  # only what is stored has a column
        found[keys] = keys.select("_index").set("other", torch.zeros(2))
    assert found[keys]["_index"].tolist() == [0, 1]
    with pytest.raises(rbtool.MissingKeyError, match="'reward'"):  # entries of the example are not optional
        made()[keys] = values.exclude("reward")


@pytest.mark.parametrize("make", [lambda: made(max_size=4), lambda: made(storage_constructor=lambda: ListStorage(4))])
def test_more_keys_than_there_is_room_for(make: Any) -> None:
    found = make()
    found[keys_of([0, 1, 2])] = values_of([0, 1, 2])
    with pytest.raises(rbtool.SchemaError, match="found 5 different keys, but the map has room for 4"):
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


def test_maps_collate_objects() -> None:
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


def test_maps_are_saved_and_loaded() -> None:
    found, other, file = made(), made(), io.BytesIO()
    numbers = [*range(3000)]
    found[keys_of(numbers)] = values_of(numbers)
    torch.save(found.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert (len(other), other[keys_of([2999, 5])]["reward"][:, 0].tolist()) == (3000, [2999, 5])
    other[keys_of([3000, 5])] = values_of([1, 2])
    assert other[keys_of([3000, 5])]["reward"][:, 0].tolist() == [1, 2]


def query_of(module: Any) -> Any:
    return QueryModule(in_keys=["state"], hash_module=module)(pairs((1, 0)))


def map_of(**options: Any) -> TensorDictMap:
    return TensorDictMap(query_module=QueryModule(in_keys=["state"]), **options)


@pytest.mark.parametrize("given", [None, SipHash(), [SipHash(), RandomProjectionHash()], abs])
def test_the_hash_module_of_each_key(given: Any) -> None:
    query = QueryModule(in_keys=["a", ("b", "c")], hash_module=given)
    found = query.hash_module
    assert list(found) == ["a", ("b", "c")]
    expected = given if isinstance(given, list) else [given] * 2
    assert all(one is other or given is None for one, other in zip(found.values(), expected, strict=True))
    assert all(callable(one) and one is not query.aggregator for one in found.values())


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: QueryModule(in_keys=[]), rbtool.UsageError, "expected a list of one key or more"),
        (lambda: QueryModule(in_keys="state"), rbtool.UsageError, "expected a list of one key or more"),
        (lambda: QueryModule(in_keys=["a", "b"], hash_module=[SipHash()]), rbtool.UsageError,
         "found 1 hash modules, expected one for each"),
        (lambda: QueryModule(in_keys=["a"], hash_to_int=hash), rbtool.UsageError, "expected a HashToInt"),
        (lambda: query_of(SipHash(as_tensor=False)), rbtool.UsageError, "returned bytes"),
        (lambda: query_of(lambda x: torch.zeros(len(x), 2)), rbtool.SchemaError, r"returned \[1, 2\] for 1 rows"),
        (lambda: map_of(storage={}), rbtool.UsageError, "a dict of storages by out key"),
        (lambda: map_of(storage=[1]), rbtool.UsageError, "a dict of storages by out key"),
        (lambda: map_of(storage={"a": ListStorage(3)}, out_keys=["b"]), rbtool.UsageError, "out_keys are"),
        (lambda: made(in_keys=["staet"]), rbtool.MissingKeyError, "staet"),
    ],
)  # fmt: skip
def test_queries_and_maps_of_nonsense_are_refused(make: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make()


@pytest.fixture
def gpu() -> Iterator[type[Pretended]]:
    with pretended_gpu() as found:
        yield found


def test_maps_answer_on_the_device_of_the_keys(gpu: type[Pretended]) -> None:
    keys = TensorDict({"key": torch.arange(12.0).view(4, 3)}, [4]).to(GPU).clear_device_()
    values = TensorDict({"value": torch.arange(4.0).to(GPU)}, [4])
    made = TensorDictMap.from_tensordict_pair(keys, values, in_keys=["key"], out_keys=["value"])
    made[keys[:2]] = values[:2]
    assert made.contains(keys).device == GPU
    assert made.contains(keys).tolist() == [True, True, False, False]
    assert made[keys[:2]]["value"].tolist() == [0, 1]
    assert made.query_module(keys[:2])["_index"].device == GPU
