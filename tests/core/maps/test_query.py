from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

import rbtool
from rbtool import HashToInt, QueryModule, RandomProjectionHash, SipHash


def pairs(*rows: tuple[float, int]) -> TensorDict:
    state, goal = zip(*rows, strict=True)
    return TensorDict(state=torch.tensor(state)[:, None], goal=torch.tensor(goal), batch_size=len(rows))


def constant(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(x), dtype=torch.int64)


def test_the_example_of_the_reference() -> None:
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
        (torch.zeros(1, 1), rbtool.UsageError, "entries of a tensordict, found a Tensor"),
    ],
    ids=["shape", "dtype", "missing", "text", "nested", "no tensordict"],
)
def test_keys_that_cannot_be_hashed(keys: Any, kind: type[Exception], message: str) -> None:
    query = QueryModule(in_keys=["state"])
    query(pairs((1, 0)))
    with pytest.raises(kind, match=message):
        query(keys)
    assert len(query) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"in_keys": []}, "expected a list of one key or more"),
        ({"in_keys": "state"}, "expected a list of one key or more"),
        (
            {"in_keys": ["a", "b"], "hash_module": [SipHash()]},
            "there are 1 hash modules, expected one for each",
        ),
        ({"in_keys": ["a"], "hash_to_int": hash}, "expected a HashToInt"),
    ],
)
def test_queries_of_nonsense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QueryModule(**options)


@pytest.mark.parametrize(
    ("module", "kind", "message"),
    [
        (SipHash(as_tensor=False), rbtool.UsageError, "returned bytes"),
        (lambda x: torch.zeros(len(x), 2), rbtool.SchemaError, r"made \[1, 2\] of 1 rows"),
    ],
)
def test_hash_modules_of_nonsense(module: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        QueryModule(in_keys=["state"], hash_module=module)(pairs((1, 0)))
