"""Text and other values that are no tensors and differ between rows, in storages of tensors."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from processes import in_a_child
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    is_non_tensor,
    lazy_stack,
    tensorclass,
)

from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.checkpointers.episodes import FlatStorageCheckpointer, H5StorageCheckpointer, NestedStorageCheckpointer
from rbtool.core.checkpointers.tensor import TensorStorageCheckpointer
from rbtool.core.errors import CorruptDataError, FormatError, MissingKeyError, OutOfSpaceError, SchemaError
from rbtool.core.samplers.slices import SliceSampler
from rbtool.core.storages import text
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.storages.pytree import ConstantNode, spec_from_json, spec_to_json, tree_spec_of
from rbtool.core.storages.tensor import TensorStorage
from rbtool.core.storages.text import Values, decoded, encoded

STORAGES = [LazyTensorStorage, LazyMemmapStorage]
CAPACITY = 7

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=40)
    | st.sampled_from(["", "\0", "a\0", "\0a", "\ud800", "é" * 20, "x" * 300]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


def rows(values: list[Any], first: int = 0) -> TensorDict:
    """Steps with these values, at the root and in a nest."""
    stack = NonTensorStack(*map(NonTensorData, values))
    numbers = torch.arange(first, first + len(values))
    return TensorDict({"a": numbers, "s": stack, "in": {"s": stack.clone()}}, [len(values)])


def kept(data: Any) -> list[Any]:
    """The values of rows, with their types."""
    found = data.get("s").tolist()
    assert repr(data.get(("in", "s")).tolist()) == repr(found)
    return [repr(value) for value in found]


def test_values_are_stored_in_the_documented_form() -> None:
    for value, expected in [
        ("é", "é".encode()),
        (None, b""),
        ("", b'\0""'),
        ([1, "b"], b'\0[1, "b"]'),
        (True, b"\0true"),
    ]:
        assert encoded(value, "it") == expected
        row = torch.tensor([*expected.ljust(12, b"\0")], dtype=torch.uint8)
        assert decoded(row.expand(2, 12)) == [value, value]
    for damaged in (b"\xff", b'\0["'):
        with pytest.raises(CorruptDataError, match="a row of text is damaged"):
            decoded(torch.tensor([[*damaged]], dtype=torch.uint8))


@given(st.lists(st.lists(JSON, min_size=1, max_size=4), min_size=1, max_size=6), st.sampled_from(STORAGES))
def test_a_ring_keeps_the_values_that_were_written(batches: list[list[Any]], kind: Any) -> None:
    buffer = TensorDictReplayBuffer(storage=kind(CAPACITY), batch_size=5)
    known: dict[int, Any] = {}
    count = 0
    for batch in batches:
        index = buffer.extend(rows(batch, count))
        known |= dict(zip(index.tolist(), batch, strict=True))
        count += len(batch)
        expected = [repr(known[row]) for row in range(len(known))]
        assert kept(buffer[:]) == expected
        drawn = buffer.sample()
        assert kept(drawn) == [expected[row] for row in drawn["index"].tolist()]
        assert kept(buffer[-1:]) == expected[-1:]
        assert repr(buffer[0]["s"]) == expected[0]
    assert kept(pickle.loads(pickle.dumps(buffer))[:]) == expected
    other = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=5)
    other.load_state_dict(buffer.state_dict())
    assert kept(other[:]) == expected


@pytest.mark.parametrize("kind", STORAGES)
def test_a_value_that_all_rows_shared_becomes_a_column(kind: Any) -> None:
    storage = kind(CAPACITY)
    storage.set(range(2), TensorDict({"a": torch.ones(2), "s": NonTensorData("x"), "t": NonTensorData(1)}, [2]))
    before = storage[:]
    storage.set(2, TensorDict({"a": torch.tensor(2.0), "s": NonTensorData("y"), "t": NonTensorData(1)}, []))
    assert (storage[:]["s"], storage[2]["s"], before["s"]) == (["x", "x", "y"], "y", ["x", "x"])
    assert [*storage.structure.constants()] == [(("t",), 1)]
    storage.set(1, TensorDict({"a": torch.tensor(2.0), "s": NonTensorData("long " * 99), "t": NonTensorData(True)}, []))
    assert (storage[:]["s"], storage[:]["t"]) == (["x", "long " * 99, "y"], [1, True, 1])
    assert [type(value) for value in storage[:]["t"]] == [int, bool, int]


def test_rows_may_hold_text_alone() -> None:
    @tensorclass(nocast=True)
    class Line:
        role: str
        text: str

    for kind in STORAGES:
        storage = kind(CAPACITY)
        storage.set(range(2), Line("user", "hi", batch_size=[2]))
        storage.set(2, Line("user", "bye", batch_size=[]))
        found = storage[torch.tensor([2, 0])]
        assert (type(found), found.role, found.text) == (Line, ["user", "user"], ["bye", "hi"])


def test_rows_of_different_entries_or_lengths_are_refused() -> None:
    @tensorclass(nocast=True)
    class Line:
        text: str
        tokens: torch.Tensor | None = None

    lines = Line.maybe_dense_stack([Line("a"), Line("b", torch.ones(2))])
    with pytest.raises(SchemaError, match="'tokens' is not in all parts of a lazy stack"):
        LazyTensorStorage(CAPACITY).set(range(2), lines)
    ragged = NonTensorStack(NonTensorStack("a", "b"), NonTensorStack("c"))
    with pytest.raises(SchemaError, match=r"rows that differ in length, \[2, -1\]"):
        LazyTensorStorage(5).set(range(2), TensorDict({"a": torch.zeros(2), "s": ragged}, [2]))


@pytest.mark.parametrize("kind", STORAGES)
def test_elements_with_dimensions_of_their_own_and_lanes(kind: Any) -> None:
    words = [["a", "b"], ["c", None], ["d" * 90, "f"]]
    data = TensorDict({"a": torch.zeros(3, 2), "s": words}, [3, 2])
    for ndim in (1, 2):
        storage = kind(8, ndim=ndim)
        storage.set(range(3), data)
        assert (storage[:]["s"], storage[1:]["s"]) == (words, words[1:])
        assert storage[torch.tensor([2, 0])]["s"] == [words[2], words[0]]
    assert storage[torch.tensor([0, 2]), torch.tensor([1, 0])]["s"] == ["b", "d" * 90]
    storage.set((torch.tensor([1]), torch.tensor([1])), TensorDict({"a": torch.ones(1), "s": ["now " * 99]}, [1]))
    assert storage[:]["s"] == [words[0], ["c", "now " * 99], words[2]]
    assert storage.flatten()[:]["s"] == ["a", "b", "c", "now " * 99, "d" * 90, "f"]


def test_rows_that_are_given_one_by_one() -> None:
    items = [TensorDict({"a": torch.tensor(number), "s": "x" * number}) for number in range(5)]
    for given_rows in (items, LazyStackedTensorDict(*items), torch.stack(items)):
        storage = LazyTensorStorage(9)
        storage.set(range(5), given_rows)
        storage.set(torch.tensor([7, 6, 5, 7]), given_rows[:4])
        assert storage[:]["s"] == ["", "x", "xx", "xxx", "xxxx", "xx", "x", "xxx"]


def test_text_is_a_copy() -> None:
    storage = TensorStorage(TensorDict({"a": torch.arange(3), "s": ["a", "b", "c"]}, [3]))
    taken, contents = storage[:], storage.contents["s"]
    storage.set(range(3), TensorDict({"a": torch.arange(3), "s": ["d", "e", "f"]}, [3]))
    assert (taken["s"], contents, taken["a"].data_ptr()) == (
        ["a", "b", "c"], ["a", "b", "c"], storage[:]["a"].data_ptr()
    )  # fmt: skip
    taken["s"][0] = "z"
    assert (storage[:]["s"], storage.contents["s"]) == (["d", "e", "f"], ["d", "e", "f"])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "'s' has a object"), (("a",), "'s' has a tuple"), ([{"k": {1}}], "'s' has a list"),
        ({1: "a"}, "'s' has a dict"), (b"a", "'s' has a bytes"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", STORAGES)
def test_values_that_json_lacks_are_refused(kind: Any, value: Any, message: str) -> None:
    storage = kind(CAPACITY)
    storage.set(range(2), rows(["a", "b"]))
    with pytest.raises(SchemaError, match=message):
        storage.set(range(2, 4), rows([value, "c"]))
    assert kept(storage[:]) == ["'a'", "'b'"]


@pytest.mark.parametrize("schema", ["fixed", "open"])
@pytest.mark.parametrize("kind", STORAGES)
def test_a_failed_write_changes_no_row(kind: Any, schema: Any) -> None:
    storage = kind(CAPACITY, schema=schema)
    storage.set(range(2), rows(["a", "b"]))
    wrong = rows(["x" * 500, "y"]).set("a", torch.zeros(2))
    with pytest.raises(SchemaError, match=r"a is torch\.float32"):
        storage.set(range(2, 4), wrong)
    assert (len(storage), kept(storage[:])) == (2, ["'a'", "'b'"])
    storage.set(range(2, 4), rows(["x" * 500, "y"]))
    assert kept(storage[:]) == ["'a'", "'b'", repr("x" * 500), "'y'"]


@pytest.mark.parametrize("kind", STORAGES)
def test_rows_without_text_have_none(kind: Any) -> None:
    storage = kind(CAPACITY, schema="open")
    storage.set(0, TensorDict({"a": torch.tensor(1)}))
    storage.set(1, TensorDict({"a": torch.tensor(1), "s": "x", "t": "y"}))
    storage.set(2, TensorDict({"a": torch.tensor(1), "t": "z" * 99}))
    assert (storage[:]["s"], storage[:]["t"]) == ([None, "x", None], [None, "y", "z" * 99])
    shared = kind(CAPACITY, schema="open")
    shared.set(range(2), TensorDict({"a": torch.zeros(2), "s": "x"}, [2]))
    shared.set(2, TensorDict({"a": torch.tensor(1.0)}))
    assert shared[:]["s"] == ["x", "x", None]
    unwritten = TensorStorage(TensorDict(batch_size=[4]))
    unwritten.set(range(1, 3), TensorDict({"a": torch.ones(2), "s": "x"}, [2]))
    assert unwritten[:]["s"] == [None, "x", "x", None]


def test_text_is_refused_where_tensors_are_needed(tmp_path: Path) -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=2)
    buffer.extend(rows(["a", "b", "c"]))
    with pytest.raises(SchemaError, match="'s' holds text"):
        buffer.storage.editable(("s",))
    with pytest.raises(SchemaError, match="'s' is text that differs between rows"):
        buffer.sample(out=buffer.sample())
    sampler = SliceSampler(slice_len=1, traj_key="s")
    with pytest.raises((MissingKeyError, SchemaError)):
        sampler.sample(buffer.storage, 1)
    buffer.storage.checkpointer = TensorStorageCheckpointer(compatible=True)  # TorchRL could not read it
    with pytest.raises(SchemaError, match="is text that differs between rows"):
        buffer.storage.dumps(tmp_path / "one")
    assert not (tmp_path / "one").exists()


# Values that all rows share -------------------------------------------------------------------------

USES: dict[str, Any] = {
    "entry": lambda rows: rows["s"],
    "list": lambda rows: rows.tolist(),
    "row numbers": lambda rows: rows[torch.tensor([2, 0])]["s"],
    "one row": lambda rows: rows[1]["s"],
    "slice": lambda rows: rows[1:3]["s"],
    "mask": lambda rows: rows[torch.tensor([True, False, True, False])]["s"],
    "stack": lambda rows: torch.stack([rows, rows])["s"],
    "cat": lambda rows: torch.cat([rows, rows.clone()])["s"],
    "lazy stack": lambda rows: lazy_stack([rows, rows])["s"],
    "reshape": lambda rows: rows.reshape(2, 2)["s"],
    "expand": lambda rows: rows.expand(3, 4).permute(1, 0)["s"],
    "to": lambda rows: rows.to("cpu")["in", "s"],
    "pickle": lambda rows: pickle.loads(pickle.dumps(rows))["s"],
    "unbind": lambda rows: [row["s"] for row in rows.unbind(0)],
    "split": lambda rows: [part["s"] for part in rows.split(3)],
    "apply": lambda rows: rows.apply(lambda leaf: leaf + 1)["s"],
    "gather": lambda rows: rows.gather(0, torch.tensor([1, 1]))["s"],
    "files": lambda rows: rows.memmap()["s"],
    "shared memory": lambda rows: rows.share_memory_()["s"],
    "flat keys": lambda rows: rows.flatten_keys(".")["in.s"],
    "dict": lambda rows: rows.to_dict(),
    "text": lambda rows: repr(rows),
    "batch size": lambda rows: (setattr(rows, "batch_size", []), rows["s"])[1],
    "item": lambda rows: (rows["s"].__setitem__(0, "z"), rows["s"], rows["in", "s"])[1:],
    "row": lambda rows: (rows.__setitem__(1, rows[1].clone().set("s", "z")), rows["s"])[1],
    "what it is": lambda rows: (is_non_tensor(rows.get("s")), rows.get("s").shape, rows.get("s").device, rows.device),
}


@pytest.mark.parametrize("use", USES)
def test_a_value_that_all_rows_share_is_used_as_a_stack_of_tensordict_is(use: str, monkeypatch: Any) -> None:
    def rows(value: Any) -> TensorDict:
        return TensorDict({"a": torch.arange(4.0), "s": value(), "in": {"s": value()}}, [4])

    expected = USES[use](rows(lambda: NonTensorStack(*"xxxx")))
    assert repr(USES[use](rows(lambda: Values.of("x", torch.Size([4]))))) == repr(expected)
    monkeypatch.setattr(text, "_INITIAL", {})
    assert repr(USES[use](rows(lambda: Values.of("x", torch.Size([4]))))) == repr(expected)


def test_tensordict_stacks_values_as_is_known_here() -> None:
    assert text._INITIAL
    found = Values.of("x", torch.Size([2, 3]))
    assert (found.shape, type(found)) == ((2, 3), Values)
    assert found.tolist() == [["x"] * 3] * 2
    assert type(found) is NonTensorStack


@pytest.mark.parametrize("value", [True, [1, {"k": None}], {"k": [1.5]}, ("a",), object()])
def test_a_stack_of_one_value_is_that_value_in_all_rows(value: Any) -> None:
    storage = LazyTensorStorage(9)
    storage.set(range(2), TensorDict({"a": torch.ones(2), "s": NonTensorStack(*[NonTensorData(value)] * 2)}, [2]))
    storage.set(range(2, 4), TensorDict({"a": torch.ones(2), "s": NonTensorData(value)}, [2]))
    assert (storage[:]["s"], storage[1]["s"], storage[torch.tensor([3, 1])].get("s").tolist()) == (
        [value] * 4, value, [value] * 2
    )  # fmt: skip


@pytest.mark.parametrize(("first", "second"), [(1, True), (1, 1.0), ([1], [True]), ("1", 1), ({"k": 1}, {"k": None})])
def test_values_that_only_look_alike_differ(first: Any, second: Any) -> None:
    stack = NonTensorStack(NonTensorData(first), NonTensorData(second))
    structure = tree_spec_of(TensorDict({"s": stack}, [2]), 1)
    assert not isinstance(structure.children["s"], ConstantNode)
    found = structure.unflatten(iter(structure.flatten(TensorDict({"s": stack}, [2]))), torch.Size([2]))
    assert repr(found.get("s").tolist()) == repr([first, second])


# Files and processes --------------------------------------------------------------------------------


def test_files_of_text_are_padded_columns(tmp_path: Path) -> None:
    storage = LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path)
    storage.set(range(2), TensorDict({"a": torch.zeros(2), "s": "x"}, [2]))
    assert json.loads((tmp_path / "s/meta.json").read_text())["data"] == "x"
    storage.set(2, TensorDict({"a": torch.zeros(()), "s": "y"}))
    storage.set(3, TensorDict({"a": torch.zeros(()), "s": "z" * 50}))
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert files == ["a.memmap", "meta.json", "s.memmap"]
    column = (tmp_path / "s.memmap").read_bytes()[: 4 * 64]
    assert column == b"".join(text.ljust(64, b"\0") for text in (b"x", b"x", b"y", b"z" * 50))
    assert TensorDict.load_memmap(tmp_path)["s"].shape == (CAPACITY, 64)
    storage.dumps(tmp_path)
    other = LazyTensorStorage(CAPACITY)
    other.loads(tmp_path)
    assert other[:]["s"] == ["x", "x", "y", "z" * 50]
    storage.cleanup()
    assert not [*tmp_path.rglob("*.memmap")]


def test_a_disk_without_room_for_longer_text_changes_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    storage = LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path)
    storage.set(range(2), rows(["a", "b"]))
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", mock.Mock(side_effect=OSError(28, os.strerror(28))))
        with pytest.raises(OutOfSpaceError):
            storage.set(range(2, 4), rows(["a" * 99, "b"]))
    assert kept(storage[:]) == ["'a'", "'b'"]
    storage.set(range(2, 4), rows(["a" * 99, "b"]))
    assert kept(storage[:]) == ["'a'", "'b'", repr("a" * 99), "'b'"]


@pytest.mark.parametrize("kind", STORAGES)
def test_processes_share_text_that_fits(kind: Any) -> None:
    storage = kind(CAPACITY)
    storage.set(range(2), rows(["a" * 40, "b"]))
    storage.share()

    def write() -> None:
        storage.set(range(2, 4), rows(["c", "d" * 60]))
        with pytest.raises(SchemaError, match=r"'s' needs a wider column .* other processes"):
            storage.set(range(4, 6), rows(["e", "f" * 65]))

    assert in_a_child(write) is None
    assert kept(storage[:]) == [repr("a" * 40), "'b'", "'c'", repr("d" * 60)]
    with pytest.raises(SchemaError, match="'s' needs a wider column"):
        storage.set(range(4, 6), rows(["e", "f" * 65]))
    assert len(storage) == 4


# Checkpoints ----------------------------------------------------------------------------------------

CHECKPOINTERS: Any = [
    TensorStorageCheckpointer, FlatStorageCheckpointer, NestedStorageCheckpointer, H5StorageCheckpointer
]  # fmt: skip


def episodes(first: int, words: list[Any]) -> TensorDict:
    """Steps of episodes of three, whose text after an action is that before the next one."""
    count = len(words)
    numbers = torch.arange(first, first + count)
    done = (numbers % 3 == 2).unsqueeze(-1)
    after = {"s": [*words[1:], "end"], "done": done, "terminated": done, "reward": numbers.unsqueeze(-1).float()}
    data = TensorDict({"s": words, "action": numbers, "next": TensorDict(after, [count])}, [count])
    return data.set("task", NonTensorData("door", [count]))


def buffer_of(storage: Any) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(storage=storage, batch_size=4)


def texts(buffer: Any) -> list[Any]:
    found = buffer[:]
    return [found["s"], found["next", "s"], found["task"], found["action"].tolist()]


RECEIVERS: dict[str, Any] = {
    "empty": lambda storage: buffer_of(storage),
    "narrower": lambda storage: _extended(storage, ["k"] * 2),
    "wider": lambda storage: _extended(storage, ["k" * 200, "l"]),
    "shared": lambda storage: _extended(storage, ["end", "end"]),
}


def _extended(storage: Any, words: list[Any]) -> TensorDictReplayBuffer:
    buffer = buffer_of(storage)
    buffer.extend(episodes(100, words))
    return buffer


@pytest.mark.parametrize("receiver", RECEIVERS)
@pytest.mark.parametrize("checkpointer", CHECKPOINTERS)
def test_a_checkpoint_is_loaded_into_any_storage(checkpointer: Any, receiver: str, tmp_path: Path) -> None:
    kind = STORAGES[(CHECKPOINTERS.index(checkpointer) + list(RECEIVERS).index(receiver)) % 2]
    buffer = buffer_of(kind(12, checkpointer=checkpointer()))
    buffer.extend(episodes(0, [f"é {number}" * (number + 1) for number in range(9)]))
    buffer.extend(episodes(9, [None, "", {"k": [1, "x"]}, 4.5, "y", "z"]))  # a ring that is full
    buffer.dumps(tmp_path / "one")
    other = RECEIVERS[receiver](kind(12, checkpointer=checkpointer()))
    other.loads(tmp_path / "one")
    assert texts(other) == texts(buffer)
    for one in (buffer, other):
        one.extend(episodes(15, ["w" * 333, "v", "u"]))
    other.dumps(tmp_path / "one")
    last = buffer_of(LazyTensorStorage(12, checkpointer=checkpointer()))
    last.loads(tmp_path / "one")
    assert texts(last) == texts(other) == texts(buffer)


def test_a_dump_in_the_background_saves_the_text_of_its_start(tmp_path: Path) -> None:
    words = [f"s{number}" for number in range(9)]
    buffer = _extended(LazyTensorStorage(12), words)
    expected = [words, [*words[1:], "end"], ["door"] * 9, [*range(100, 109)]]
    captured = TensorStorageCheckpointer().capture(buffer.storage, tmp_path / "one")
    assert captured is not None
    with captured:
        buffer.extend(episodes(9, ["long " * 99] * 6))
        captured.write()
    other = LazyTensorStorage(12)
    other.loads(tmp_path / "one")
    assert texts(other) == expected
    assert texts(buffer)[0][:3] == ["long " * 99] * 3


def test_text_of_torchrl_is_loaded(tmp_path: Path) -> None:
    words = [["a", "b"], ["c", [1]], ["", ""], ["", ""]]
    meta = {"a": {"shape": [4, 2], "dtype": "torch.float32"}, "s": {"type": "NonTensorStack"}, "shape": [4, 2]}
    (tmp_path / "meta.json").write_text(json.dumps(meta | {"_type": "<class 'tensordict._td.TensorDict'>"}))
    (tmp_path / "storage_metadata.json").write_text('{"metadata": {}, "is_pytree": false, "len": 2}')
    (tmp_path / "a.memmap").write_bytes(bytes(32))
    (tmp_path / "s").mkdir()
    stack = {"_type": "<class 'tensordict.tensorclass.NonTensorStack'>", "stack_dim": 0, "data": words}
    (tmp_path / "s/meta.json").write_text(json.dumps(stack))
    storage = LazyTensorStorage(9)
    storage.loads(tmp_path)
    assert storage[:]["s"] == words[:2]
    (tmp_path / "s/meta.json").write_text(json.dumps(stack | {"data": words[:3]}))
    with pytest.raises(FormatError, match="a stack of non-tensor values in a form that is not known"):
        storage.loads(tmp_path)


def test_the_structure_is_written_and_read_as_json() -> None:
    storage = LazyTensorStorage(CAPACITY)
    storage.set(range(2), rows(["a", "b"]))
    document = spec_to_json(storage.structure)
    assert [*spec_from_json(document).texts()] == [*storage.structure.texts()]
    with pytest.raises(FormatError):
        spec_from_json(json.loads(json.dumps(document).replace('"text"', '"words"')))


def test_saved_data_without_the_shared_text_of_a_storage_is_refused(tmp_path: Path) -> None:
    saved, receiver = (TensorDictReplayBuffer(storage=LazyTensorStorage(4), batch_size=2) for _ in range(2))
    saved.extend(TensorDict({"x": torch.arange(3)}, [3]))
    saved.dumps(tmp_path / "saved")
    receiver.extend(TensorDict({"x": torch.tensor([7]), "t": "walk"}, [1]))
    with pytest.raises(SchemaError, match="no such entry"):
        receiver.loads(tmp_path / "saved")
    assert receiver[:]["x"].tolist() == [7]


def test_shared_text_may_be_half_a_pair_of_surrogates(tmp_path: Path) -> None:
    storage = LazyMemmapStorage(4, scratch_dir=tmp_path)
    storage.set(range(1), TensorDict({"x": torch.tensor([0]), "t": "\ud800"}, [1]))
    assert list(storage.get(range(1))["t"]) == ["\ud800"]
