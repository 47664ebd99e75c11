"""Spaces of manifests and gymnasium, specs of tensordicts, and the former names of specs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from cases import each
from peer_checks import require_checks
from processes import Interpreter
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, tensorclass

import rbtool
from rbtool.core.datasets.buffer import DatasetReplayBuffer
from rbtool.core.datasets.load_dataset import load_dataset
from rbtool.core.errors import FormatError
from rbtool.core.format.documents import plain
from rbtool.core.specs import interop
from rbtool.core.specs.base import TensorSpec
from rbtool.core.specs.bounded import Bounded, Unbounded
from rbtool.core.specs.categorical import Binary, Categorical, MultiCategorical, MultiOneHot, OneHot
from rbtool.core.specs.composite import (
    Composite,
    StackedComposite,
    check_no_exclusive_keys,
    consolidate_spec,
    contains_lazy_spec,
)
from rbtool.core.specs.interop import make_composite_from_td, space_from_spec, spec_from_space
from rbtool.core.specs.non_tensor import Choice, NonTensor
from rbtool.core.storages.lazy_tensor import LazyTensorStorage
from rbtool.core.testing.datasets import relist, write_walks

INF = float("inf")
BOX = {"type": "Box", "dtype": "float32", "shape": [2], "low": [0.0, "-inf"], "high": "inf"}


@each(
    ("document", "spec"),
    [
        (BOX, Bounded([0, -INF], INF)),
        ({**BOX, "low": -1, "high": 1}, Bounded(-1, 1, (2,))),
        ({**BOX, "low": 0, "high": 255, "dtype": "uint8", "shape": [3, 4]}, Bounded(0, 255, (3, 4), dtype=torch.uint8)),
        ({**BOX, "low": -(2**63), "high": 2**63 - 1, "dtype": "int64", "shape": []},
         Bounded(-(2**63), 2**63 - 1, (), dtype=torch.int64)),
        ({"type": "Discrete", "dtype": "int64", "start": 0, "n": 4}, Categorical(4)),
        ({"type": "Discrete", "n": 4}, Categorical(4)),
        ({"type": "Discrete", "dtype": "int32", "start": -1, "n": 4}, Bounded(-1, 2, (), dtype=torch.int32)),
        ({"type": "MultiDiscrete", "dtype": "int64", "nvec": [2, 3]}, MultiCategorical([2, 3], remove_singleton=False)),
        ({"type": "MultiDiscrete", "dtype": "int64", "nvec": [2, 3], "start": [1, 0]},
         Bounded([1, 0], [2, 2], dtype=torch.int64)),
        ({"type": "MultiBinary", "n": 25}, Binary(25)),
        ({"type": "MultiBinary", "n": [2, 3]}, Binary(shape=(2, 3))),
        ({"type": "Text", "max_length": 40}, NonTensor((), example_data="")),
    ],
)  # fmt: skip
def test_spaces_of_leaves_become_specs(document: dict[str, Any], spec: Any) -> None:
    assert spec_from_space(document) == spec


def test_nested_spaces_become_composites() -> None:
    pair = {"type": "Tuple", "subspaces": [{"type": "Discrete", "n": 2}, BOX]}
    spec = spec_from_space({"type": "Dict", "subspaces": {"pos": BOX, "pair": pair, "text": None}}, "cpu")
    assert isinstance(spec, Composite)
    assert list(spec.keys(True, True)) == ["pos", ("pair", "0"), ("pair", "1"), "text"]
    assert spec["pair", "1"] == spec["pos"]
    assert spec["text"] is None
    assert spec.device == torch.device("cpu")


@each(
    "document",
    [
        None, 3, {}, {"type": "Graph"}, {"type": "Box"}, {**BOX, "low": [1, 2, 3]}, {**BOX, "low": "nan"},
        {**BOX, "low": "text"}, {**BOX, "low": 5, "high": 1}, {**BOX, "dtype": "text"}, {**BOX, "shape": None},
        {**BOX, "shape": [-3]}, {"type": "Discrete", "n": 0}, {"type": "Discrete", "n": 0, "start": 2},
        {"type": "Discrete", "n": "four"}, {"type": "MultiDiscrete", "nvec": [0.5]}, {"type": "MultiBinary", "n": -1},
        {"type": "MultiBinary"}, {"type": "Dict"}, {"type": "Dict", "subspaces": 3}, {**BOX, "dtype": "U3"},
        {"type": "Dict", "subspaces": {"a": 3}}, {"type": "Dict", "subspaces": {"shape": BOX}}, {"type": ["Box"]},
    ],
)  # fmt: skip
def test_documents_that_are_no_space_are_refused(document: Any) -> None:
    with pytest.raises(FormatError, match=r"space"):
        spec_from_space(document)


SPACES = gymnasium.spaces.Dict(
    {
        "box": gymnasium.spaces.Box(-1, np.array([1, np.inf], np.float32), (2,)),
        "image": gymnasium.spaces.Box(0, 255, (4, 4, 3), np.uint8),
        "number": gymnasium.spaces.Discrete(5, start=3),
        "numbers": gymnasium.spaces.MultiDiscrete([2, 7]),
        "bits": gymnasium.spaces.MultiBinary((2, 3)),
        "pair": gymnasium.spaces.Tuple([gymnasium.spaces.Discrete(2), gymnasium.spaces.Box(0, 1, (), np.float64)]),
        "words": gymnasium.spaces.Text(8),
    }
)


def named(value: Any) -> Any:
    """Call elements of a tuple by their numbers."""
    if isinstance(value, tuple):
        value = {str(number): item for number, item in enumerate(value)}
    return {name: named(item) for name, item in value.items()} if isinstance(value, dict) else value


def test_a_spec_and_its_gymnasium_space_have_the_same_members() -> None:
    from minari.serialization import serialize_space

    torch.manual_seed(0)
    SPACES.seed(0)
    spec = spec_from_space(SPACES)
    for _ in range(20):
        assert spec.is_in(spec.encode(named(SPACES.sample())))
        drawn = spec.to_numpy(spec.rand())
        for name in ("box", "image", "number", "numbers", "bits"):
            assert drawn[name] in SPACES[name], name
    assert spec.is_in(spec.rand((3,)))
    assert spec_from_space(plain(json.loads(serialize_space(SPACES)))) == spec


def test_specs_load_no_gymnasium(interpreter: Interpreter) -> None:
    code = "import sys, rbtool.core.specs; print([m for m in sys.modules if m.startswith(('gym', 'minari'))])"
    done = interpreter.run(code)
    assert done.stdout.strip() == "[]"


LIKE: list[TensorSpec] = [
    Bounded(-1, [2.0, 3.0]), Bounded(-3, 5, (2,), dtype=torch.int16), Bounded(-3, 5, (), dtype=torch.int64),
    Bounded(0, float("inf"), (3,), dtype=torch.float64), Unbounded((3,)), Unbounded((2,), dtype=torch.uint8),
    Categorical(4), Categorical(3, dtype=torch.uint8), MultiCategorical([2, 5], remove_singleton=False), Binary(3),
    Composite(a=Bounded(-1, 1, (2,)), b={"c": Categorical(3), "d": Binary(2)}),
]  # fmt: skip


@pytest.mark.parametrize("spec", LIKE, ids=lambda spec: type(spec).__name__)
def test_the_space_of_a_spec_holds_the_same_values(spec: TensorSpec) -> None:
    space = space_from_spec(spec)
    space.seed(0)
    for _ in range(10):
        assert space.contains(_plain(spec.to_numpy(spec.rand())))
        assert spec.is_in(spec.encode(space.sample()))
    again = spec_from_space(space)
    assert again == spec or isinstance(spec, Unbounded) or not spec.shape


def _plain(value: Any) -> Any:
    """Numbers without a shape as gymnasium has them."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value[()] if isinstance(value, np.ndarray) and not value.shape else value


def test_spaces_that_hold_more_than_the_spec() -> None:
    masked = Categorical(3, (2,), mask=torch.tensor([True, False, True]))
    for spec in (masked, OneHot(3), MultiOneHot([2, 3]), Unbounded((2,), dtype=torch.bool)):
        space = space_from_spec(spec)
        assert space.contains(np.asarray(spec.rand()).astype(space.dtype))
    assert space_from_spec(NonTensor((), example_data="a")).contains("left")
    stacked: Any = torch.stack([Bounded(0, 1, (2,)), Bounded(0, 1, (3,))])
    assert [space.shape for space in space_from_spec(stacked).spaces] == [(2,), (3,)]


@each(
    ("spec", "says"),
    [
        (Unbounded((-1,)), "unknown"),
        (Unbounded((1,), dtype=torch.complex64), "complex64"),
        (Bounded(0, 1, (2,), dtype=torch.bfloat16), "bfloat16"),
        (NonTensor((), example_data=3), "NonTensor"),
        (Choice([Categorical(3)]), "Choice"),
    ],
)
def test_specs_without_a_space_are_refused(spec: TensorSpec, says: str) -> None:
    with pytest.raises(RuntimeError, match=says):
        space_from_spec(spec)


@tensorclass
class Step:
    x: torch.Tensor


def test_a_tensordict_is_a_member_of_its_spec() -> None:
    inner = TensorDict({"b": torch.zeros(4, 2, dtype=torch.uint8)}, [4, 2])
    step: Any = Step(x=torch.zeros(4, 5), batch_size=[4])  # type: ignore[call-arg]
    entries = {"a": torch.zeros(4, 3), "in": inner, "step": step, "text": NonTensorStack(*"abcd")}
    td = TensorDict(entries, [4])
    spec = make_composite_from_td(td)
    assert spec.is_in(td)
    assert spec.is_in(spec.rand())
    assert (spec["in"].shape, spec["in", "b"].dtype) == ((4, 2), torch.uint8)
    assert (spec["text"].example_data, spec["step"].data_cls, spec.data_cls) == ("a", Step, TensorDict)


def test_specs_of_a_tensordict_have_its_shapes() -> None:
    td = TensorDict({"a": torch.zeros(()), "b": torch.zeros(3), "c": torch.zeros(2, 3)}, [])
    assert [entry.shape for entry in make_composite_from_td(td).values() if entry] == [(1,), (3,), (2, 3)]
    free = make_composite_from_td(td, unsqueeze_null_shapes=False, dynamic_shape=True)
    assert [entry.shape for entry in free.values() if entry] == [(), (-1,), (2, -1)]
    batched = make_composite_from_td(TensorDict({"a": torch.zeros(5)}, [5]), dynamic_shape=True)
    assert batched["a"].shape == (5,)


def test_a_lazy_stack_has_a_lazy_spec() -> None:
    td = LazyStackedTensorDict.lazy_stack([TensorDict({"a": torch.zeros(n)}, []) for n in (2, 3)], 0)
    spec = make_composite_from_td(td)
    assert type(spec) is StackedComposite
    assert spec.is_in(td)


@each("function", [make_composite_from_td, consolidate_spec, contains_lazy_spec, check_no_exclusive_keys])
def test_a_dict_is_no_nest_and_no_spec(function: Any) -> None:
    with pytest.raises(TypeError, match="is a dict, expected a"):
        function({"a": 1})


FORMER = [name for name, found in vars(interop).items() if isinstance(found, interop.FormerName)]


@each("name", FORMER)
def test_former_names_are_the_current_classes_and_warn(name: str) -> None:
    former = getattr(rbtool, name)
    arguments: Any = {
        "BoundedTensorSpec": (0, 1, (2,)), "DiscreteTensorSpec": (3,), "OneHotDiscreteTensorSpec": (3,),
        "MultiDiscreteTensorSpec": ([2, 3],), "MultiOneHotDiscreteTensorSpec": ([2, 3],),
        "BinaryDiscreteTensorSpec": (3,), "LazyStackedTensorSpec": (Unbounded(()),),
        "LazyStackedCompositeSpec": (Composite(),),
    }.get(name, ())  # fmt: skip
    assert len(FORMER) == 12
    with pytest.warns(DeprecationWarning, match=f"{name} is now called {former.now.__name__}"):
        spec = former(*arguments, **({"dim": 0} if "LazyStacked" in name else {}))
    assert isinstance(spec, former.now)
    assert isinstance(spec, former)
    assert issubclass(former.now, former)


BOX_OF_DATASETS = {"type": "Box", "shape": [2], "dtype": "float64", "low": -1.0, "high": 1.0}
OPEN = {"type": "Box", "shape": [3], "dtype": "float64", "low": "-inf", "high": "inf"}


def walks(folder: Path, spaces: Any) -> Any:
    write_walks(folder / "walks", [(10, "terminated"), (3, "truncated")])
    relist(folder / "walks", spaces=spaces)
    return load_dataset(folder / "walks", batch_size=4)


def test_every_field_has_a_spec_of_its_type_and_shape(tmp_path: Path) -> None:
    data = walks(tmp_path, {"action": BOX_OF_DATASETS, "observation": OPEN})
    assert data.specs["action"] == Bounded(-1, 1, (2,), dtype=torch.float32)
    assert data.specs["observation"] == data.specs["next", "observation"] == Unbounded((3,), dtype=torch.float64)
    assert data.specs["next", "done"] == Unbounded((1,), dtype=torch.bool)
    batch = data.sample()
    assert set(data.specs.keys(True, True)) <= {*batch.keys(True, True)}
    action = data.specs.pop("action")
    assert data.specs.is_in(batch)
    assert action.is_in(action.project(batch["action"]))


@each(
    "space",
    [
        None,
        {"type": "Text"},
        {"type": "Box", "shape": [5], "dtype": "float32", "low": 0, "high": 1},
        {"type": "Dict", "subspaces": {"other": BOX_OF_DATASETS}},
    ],
)
def test_a_space_that_does_not_fit_the_field_leaves_it_open(tmp_path: Path, space: Any) -> None:
    spaces = {} if space is None else {"action": space}
    assert walks(tmp_path, spaces).specs["action"] == Unbounded((2,), dtype=torch.float32)


def test_rows_in_memory_have_no_recorded_spec() -> None:
    with pytest.raises(RuntimeError, match="no dataset on disk"):
        _ = DatasetReplayBuffer(storage=LazyTensorStorage(3)).specs


# Specs of rbtool and TorchRL in one process, whichever library comes first: the checks are in `bridge_checks.py`.

CHECKS = Path(__file__).with_name("bridge_checks.py")


@pytest.mark.peer
@pytest.mark.parametrize("first", ["rbtool", "torchrl"])
def test_specs_work_in_the_other_library(first: str) -> None:
    pytest.importorskip("torchrl")
    require_checks(CHECKS, first)


WITHOUT_TORCHRL = """
import sys
import rbtool
spec = rbtool.Composite(a=rbtool.OneHot(3))
try:
    spec.to_torchrl()
except ImportError as error:
    print(error)
assert not any(name.partition(".")[0] == "torchrl" for name in sys.modules)
"""


def test_torchrl_is_never_imported(interpreter: Interpreter) -> None:
    done = interpreter.run(WITHOUT_TORCHRL)
    assert (done.returncode, done.stderr) == (0, "")
    assert "torchrl" in done.stdout
