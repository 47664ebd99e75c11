"""SipHash, projections, and tables that number keys by their hashes: compiled and plain."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rbtool.core.kernels.rows import compiled_module
from rbtool.core.maps import compiled_hashes, tensordict_map
from rbtool.core.maps.tensordict_map import CompiledTable, KeyTable, PlainTable, key_table, project, siphash

KEY = bytes(range(16))

VECTORS = bytes.fromhex("""
    310e0edd47db6f72 fd67dc93c539f874 5a4fa9d909806c0d 2d7efbd796666785 b7877127e09427cf 8da699cd64557618
    cee3fe586e46c9cb 37d1018bf50002ab 6224939a79f5f593 b0e4a90bdf82009e f3b9dd94c5bb5d7a a7ad6b22462fb3f4
    fbe50e86bc8f1e75 903d84c02756ea14 eef27a8e90ca23f7 e545be4961ca29a1 db9bc2577fcc2a3f 9447be2cf5e99a69
    9cd38d96f0b3c14b bd6179a71dc96dbb 98eea21af25cd6be c7673b2eb0cbf2d0 883ea3e395675393 c8ce5ccd8c030ca8
    94af49f6c650adb8 eab8858ade92e1bc f315bb5bb835d817 adcf6b0763612e2f a5c91da7acaa4dde 716595876650a2a6
    28ef495c53a387ad 42c341d8fa92d832 ce7cf2722f512771 e37859f94623f3a7 381205bb1ab0e012 ae97a10fd434e015
    b4a31508beff4d31 81396229f0907902 4d0cf49ee5d4dcca 5c73336a76d8bf9a d0a704536ba93e0e 925958fcd6420cad
    a915c29bc8067318 952b79f3bc0aa6d4 f21df2e41d4535f9 87577519048f53a9 10a56cf5dfcd9adb eb75095ccd986cd0
    51a9cb9ecba312e6 96afadfc2ce666c7 72fe52975a4364ee 5a1645b276d592a1 b274cb8ebf87870a 6f9bb4203de7b381
    eaecb2a30b22a87f 9924a43cc1315724 bd838d3aafbf8db7 0b1a2a3265d51aea 135079a3231ce660 932b2846e4d70666
    e1915f5cb1eca46c f325965ca16d629f 575ff28e60381be5 724506eb4c328a95
""")
"""The hashes of 0 to 63 bytes that count up from 0, with the key above, as the authors of SipHash publish them."""


@pytest.fixture(params=["compiled", "plain"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "plain":
        monkeypatch.setitem(sys.modules, "numba", None)
        monkeypatch.delitem(sys.modules, "rbtool.core.maps.compiled_hashes", raising=False)
        monkeypatch.delattr("rbtool.core.maps.compiled_hashes", raising=False)
    compiled_module.cache_clear()
    yield request.param
    compiled_module.cache_clear()


TABLES: dict[str, Callable[[int], KeyTable]] = {
    "compiled": lambda width: CompiledTable(width, compiled_hashes),
    "plain": PlainTable,
}
of_each_kind = pytest.mark.parametrize("make", TABLES.values(), ids=TABLES)


def test_the_published_vectors(kind: str) -> None:
    rows = [np.arange(count, dtype=np.uint8)[None] for count in range(64)]
    assert b"".join(siphash(row, KEY).astype("<i8").tobytes() for row in rows) == VECTORS


def test_rows_are_hashed_one_by_one(kind: str) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (50, 21), dtype=np.uint8)
    apart = [siphash(rows[number : number + 1], KEY)[0] for number in range(50)]
    assert siphash(rows, KEY).tolist() == apart
    assert siphash(rows[::2], KEY).tolist() == apart[::2]
    assert siphash(rows[:0], KEY).shape == (0,)


def test_another_key_gives_other_hashes(kind: str) -> None:
    rows = np.arange(8, dtype=np.uint8)[None]
    assert siphash(rows, KEY[::-1])[0] != siphash(rows, KEY)[0]


def test_products_do_not_depend_on_how_many_rows_come_at_once(kind: str) -> None:
    random = np.random.default_rng(0)
    rows, matrix = random.normal(size=(40, 300)), random.normal(size=(300, 16))
    found = project(rows, matrix)
    np.testing.assert_allclose(found, rows @ matrix)
    assert all((project(rows[number : number + 1], matrix)[0] == found[number]).all() for number in range(40))


def test_both_kinds_project_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(1)
    rows, matrix = random.normal(size=(20, 70)), random.normal(size=(70, 5))
    compiled = project(rows, matrix)
    monkeypatch.setattr(tensordict_map, "compiled_module", lambda name, package: None)
    assert (project(rows, matrix) == compiled).all()


# Tables --------------------------------------------------------------------------------------------

batches = st.lists(
    st.tuples(st.booleans(), st.lists(st.tuples(st.integers(-2, 2), st.binary(min_size=3, max_size=3)), max_size=20)),
    max_size=12,
)


def arrays(batch: list[tuple[int, bytes]]) -> tuple[np.ndarray, np.ndarray]:
    keys = np.frombuffer(b"".join(key for _, key in batch), np.uint8).reshape(len(batch), 3)
    return np.array([value for value, _ in batch], np.int64), keys


@pytest.mark.parametrize("name", TABLES)
@given(batches=batches)
def test_a_table_does_what_a_dict_does(name: str, batches: list[tuple[bool, list[tuple[int, bytes]]]]) -> None:
    table, oracle = TABLES[name](3), {}
    for extend, batch in batches:
        if extend:
            for entry in batch:
                oracle.setdefault(entry, len(oracle))
        found = (table.add if extend else table.find)(*arrays(batch))
        assert found.tolist() == [oracle.get(entry, -1) for entry in batch]
        assert len(table) == len(oracle)
    assert [(value, key.tobytes()) for value, key in zip(table.hashes.tolist(), table.keys, strict=True)] == [*oracle]


@of_each_kind
def test_keys_with_one_hash_are_told_apart_while_the_table_grows(make: Callable[[int], KeyTable]) -> None:
    table = make(8)
    keys = np.arange(3000, dtype="<i8").view(np.uint8).reshape(-1, 8)
    for start in range(0, 3000, 700):
        part = keys[start : start + 700]
        assert table.add(np.full(len(part), 7), part).tolist() == [*range(start, start + len(part))]
    assert table.find(np.full(3000, 7), keys).tolist() == [*range(3000)]
    assert table.find(np.full(1, 8), keys[:1]).tolist() == [-1]


@of_each_kind
def test_without_keys_the_hash_is_the_key(make: Callable[[int], KeyTable]) -> None:
    table, nothing = make(0), np.empty((4, 0), np.uint8)
    assert table.add(np.array([5, -5, 5, 0]), nothing).tolist() == [0, 1, 0, 2]


@of_each_kind
def test_truncated_entries_are_forgotten(make: Callable[[int], KeyTable]) -> None:
    table, values = make(0), np.arange(2000) * 1024
    nothing = np.empty((2000, 0), np.uint8)
    table.add(values, nothing)
    table.truncate(1500)
    assert table.find(values, nothing).tolist() == [*range(1500), *[-1] * 500]
    assert table.add(values[::-1].copy(), nothing)[:3].tolist() == [1500, 1501, 1502]


@of_each_kind
def test_a_table_is_pickled(make: Callable[[int], KeyTable]) -> None:
    table, keys = make(2), np.array([[1, 2], [3, 4]], np.uint8)
    table.add(np.array([9, 9]), keys)
    assert pickle.loads(pickle.dumps(table)).find(np.array([9, 9]), keys[::-1].copy()).tolist() == [1, 0]


@of_each_kind
def test_memory_grows_in_few_steps(make: Callable[[int], KeyTable]) -> None:
    table, sizes = make(0), set()
    for value in range(5000):
        table.add(np.array([value]), np.empty((1, 0), np.uint8))
        sizes.add(table.hashes.base.size)
    assert sizes == {1024, 2048, 4096, 8192}


def test_which_kind_is_made(kind: str) -> None:
    assert isinstance(key_table(3), CompiledTable if kind == "compiled" else PlainTable)
