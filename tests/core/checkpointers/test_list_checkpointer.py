from __future__ import annotations

import json
import math
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, TensorDict, tensorclass

from rbtool.core.checkpointers.lists import ListStorageCheckpointer
from rbtool.core.encodings import digests
from rbtool.core.errors import SchemaError, UsageError
from rbtool.core.storages.list_storage import CompressedListStorage, LazyStackStorage, ListStorage
from rbtool.core.storages.tensor import TensorStorage

Pair = namedtuple("Pair", ["left", "right"])


@tensorclass
class Step:
    observation: torch.Tensor


def filled(*items: object) -> ListStorage:
    storage = ListStorage(20)
    storage.set(range(len(items)), list(items))
    return storage


def nested() -> TensorDict:
    entries = {"a": torch.arange(6).reshape(3, 2), "n": {"b": torch.ones(3, dtype=torch.bfloat16)}, "s": "hey"}
    return TensorDict(entries, [3], device="cpu", names=["time"])


def entries(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def there_and_back(storage: ListStorage, path: Path) -> ListStorage:
    storage.dumps(path)
    other = type(storage)(30)
    other.set(0, TensorDict({}, []))
    other.loads(path)
    return other


def test_section_4_6_lists_are_saved_instead_of_refused(tmp_path: Path) -> None:
    items = [
        torch.tensor(3), torch.zeros(2, 0), torch.ones(2, dtype=torch.complex64), np.arange(3, dtype=np.uint16),
        np.float32(2.5), "text \ud800", None, True, 2**80, -0.5, math.inf, {"a": (torch.ones(2), [1, {"b": None}])},
        [], (), TensorDict({}, [2]),
    ]  # fmt: skip
    found = there_and_back(filled(*items), tmp_path / "storage")[:]
    assert repr(found) == repr(items)
    assert [type(item) for item in found] == [type(item) for item in items]


def test_tensordicts_keep_all_they_have(tmp_path: Path) -> None:
    lazy = LazyStackedTensorDict(TensorDict({"u": torch.ones(1)}), TensorDict({"u": torch.ones(2)}), stack_dim=0)
    found, stacked = there_and_back(filled(nested(), lazy), tmp_path / "storage")[:]
    assert (found.batch_size, found["n"].batch_size, found.names, found.device.type) == ((3,), (3,), ["time"], "cpu")
    assert (found["n", "b"].tolist(), found["n", "b"].dtype, found["s"]) == ([1, 1, 1], torch.bfloat16, "hey")
    assert [part["u"].shape[0] for part in stacked.tensordicts] == [1, 2]


@pytest.mark.parametrize("kind", [LazyStackStorage, CompressedListStorage])
def test_storages_derived_from_lists(kind: type[ListStorage], tmp_path: Path) -> None:
    storage = kind(5)
    storage.checkpointer = ListStorageCheckpointer()
    storage.set(range(2), [TensorDict({"a": torch.full((n,), n)}, [n]) for n in (1, 2)])
    storage.dumps(tmp_path / "storage")
    other = kind(2)
    other.checkpointer = ListStorageCheckpointer()
    other.loads(tmp_path / "storage")
    assert [item["a"].tolist() for item in other] == [[1], [2, 2]]


def test_an_empty_list_is_saved(tmp_path: Path) -> None:
    assert there_and_back(filled(), tmp_path / "storage")[:] == []


def test_what_was_loaded_can_be_written_and_follows_the_device(tmp_path: Path) -> None:
    filled(torch.zeros(3), torch.ones(2)).dumps(tmp_path / "storage")
    other = ListStorage(3)
    other.loads(tmp_path / "storage")
    other[0].fill_(9)
    assert [item.tolist() for item in other] == [[9, 9, 9], [1, 1]]
    there = ListStorage(3, device="meta")
    there.loads(tmp_path / "storage")
    assert there[0].device.type == "meta"


def test_sharp_edge_4_keys_with_dots(tmp_path: Path) -> None:
    item = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}
    assert repr(there_and_back(filled(item), tmp_path / "storage")[0]) == repr(item)


def test_alike_items_are_described_once(tmp_path: Path) -> None:
    filled(*(torch.tensor(n) for n in range(20))).dumps(tmp_path / "storage")
    document = json.loads((tmp_path / "storage/items.json").read_text())
    assert (len(document["kinds"]), document["items"]) == (1, [0] * 20)
    assert (tmp_path / "storage/items.memmap").stat().st_size == 160


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(),
    st.lists(st.integers(-5, 5), max_size=3).map(torch.tensor),
    st.binary(max_size=4).map(lambda data: np.array([*data])),
)  # fmt: skip
ITEMS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
    ),
    max_leaves=6,
)


@settings(max_examples=40, deadline=None)
@given(st.lists(ITEMS, max_size=5))
def test_any_nest_comes_back(tmp_path_factory: pytest.TempPathFactory, items: list[object]) -> None:
    path = tmp_path_factory.mktemp("nests") / "storage"
    assert repr(there_and_back(filled(*items), path)[:]) == repr(items)


# What cannot be saved ------------------------------------------------------------------------------------


def holds_itself() -> list[object]:
    item: list[object] = []
    item.append(item)
    return item


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (object(), "row 1: a object cannot be written to a checkpoint"),
        ({"a": {1, 2}}, "row 1: a set cannot be written"),
        ({1: "x"}, "row 1: 1 is a key of a dict; a checkpoint can hold texts as keys"),
        (Pair(1, 2), "row 1: a Pair is a named tuple"),
        (Step(torch.zeros(2), batch_size=[2]), "row 1: a Step is a tensorclass"),
        (TensorDict({"s": print}, []), "row 1: a builtin_function_or_method cannot be written"),
        (torch.zeros(2).to_sparse(), "row 1: a Tensor cannot be written"),
        (np.array(["x"]), "row 1: a ndarray cannot be written"),
        (b"bytes", "row 1: a bytes cannot be written"),
    ],
)
def test_what_would_take_a_pickle_is_refused_before_anything_is_written(
    item: object, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "storage"
    filled("old").dumps(path)
    with pytest.raises(SchemaError, match=message):
        filled("new", item).dumps(path)
    assert entries(tmp_path) == ["storage"]
    other = ListStorage(3)
    other.loads(path)
    assert other[:] == ["old"]


def test_an_item_that_holds_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="row 0 holds itself, or is nested too deeply"):
        filled(holds_itself()).dumps(tmp_path / "storage")
    assert entries(tmp_path) == []


def test_other_storages_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="serves lists of objects, found a TensorStorage"):
        ListStorageCheckpointer().dumps(TensorStorage(torch.zeros(3)), tmp_path / "storage")


# Where it is written -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["precious.txt", "items.json/x.txt"])
def test_what_is_no_checkpoint_is_left_alone(name: str, tmp_path: Path) -> None:
    path = tmp_path / "storage"
    (path / name).parent.mkdir(parents=True)
    (path / name).write_text("mine")
    with pytest.raises(UsageError, match="is not the checkpoint of a storage; left unchanged"):
        filled("x").dumps(path)
    assert (path / name).read_text() == "mine"


def test_a_file_of_somebody_else_in_a_checkpoint_is_not_lost(tmp_path: Path) -> None:
    filled("x").dumps(tmp_path / "storage")
    (tmp_path / "storage/notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"notes.txt is not part of the checkpoint"):
        filled("y").dumps(tmp_path / "storage")
    assert (tmp_path / "storage/notes.txt").read_text() == "mine"


def test_an_empty_folder_and_a_checkpoint_of_another_class_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "storage"
    path.mkdir()
    compressed = CompressedListStorage(2)
    compressed.set(0, torch.zeros(2))
    compressed.dumps(path)
    assert there_and_back(filled("x"), path)[:] == ["x"]
    assert entries(path) == [".rbtool", "items.json", "items.memmap"]


class Stopped(BaseException):
    """Stands for a power cut."""


HOOKED: list[Callable[[str], None]] = []
sys.addaudithook(lambda event, args: [hook(args[0]) for hook in HOOKED] if event == "rbtool.fs" else None)


def stop_at(number: int, act: Callable[[], None]) -> bool:
    """Run `act`, raising at its n-th announced operation; tell whether it got that far."""
    seen = []

    def count(operation: str) -> None:
        seen.append(operation)
        if len(seen) == number:
            raise Stopped

    HOOKED.append(count)
    try:
        act()
    except Stopped:
        return True
    finally:
        HOOKED.clear()
    return False


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ListStorage, CompressedListStorage])
def test_the_old_one_or_the_new_one_at_every_instant(kind: type[ListStorage], tmp_path: Path) -> None:
    old, new, path = kind(2), kind(3), tmp_path / "storage"
    old.set(0, torch.zeros(2))
    new.set(range(3), torch.ones(3, 4))
    old.dumps(path)
    number, seen = 1, set()
    while stop_at(number, lambda: new.dumps(path)):
        other = kind(3)
        other.loads(path)
        seen.add(tuple(tuple(item.tolist()) for item in other))
        if len(other) == 3:
            old.dumps(path)
        number += 1
    assert seen == {((0, 0),), ((1, 1, 1, 1),) * 3}
    assert number > 10
    assert entries(tmp_path) == ["storage"]


# Hooks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ListStorage, CompressedListStorage])
def test_hooks_are_given_the_list(kind: type[ListStorage], tmp_path: Path) -> None:
    storage, other, seen = kind(5), kind(5), []
    storage.set(range(2), ["a", "b"])
    storage.register_save_hook(lambda items, path: [*items, Path(path).name])
    storage.dumps(tmp_path / "storage")
    other.set(0, "before")
    other.register_load_hook(lambda items, out: seen.append(out) or [item * 2 for item in items])
    other.loads(tmp_path / "storage")
    assert (other[:], seen) == (["aa", "bb", "storagestorage"], [["before"]])


def test_the_bytes_of_tensors_are_not_read_back_for_their_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    own = digests._digest

    def digest(file: Path, count: int) -> str:
        read.append(file.name)
        return own(file, count)

    monkeypatch.setattr(digests, "_digest", digest)
    storage = ListStorage(3)
    storage.set(range(3), [torch.arange(5), torch.rand(2), torch.zeros(0)])
    storage.dumps(tmp_path / "saved")
    assert read == ["items.json"]
    assert digests.require_digests(tmp_path / "saved") == {"items.json", "items.memmap"}
