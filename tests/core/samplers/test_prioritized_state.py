from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rbtool.core.errors import CorruptDataError, DatasetNotFoundError, RbtoolError
from rbtool.core.samplers.prioritized import PrioritizedSampler
from rbtool.core.storages.tensor import TensorStorage

PRIORITIES = [2.0, 1.0, 1.0, 1.5, 1.0, 0.0, 7.25, 1.0, 1.0, 1.0, 1.0]
FP32_MAX = 3.4028234663852886e38
METADATA = {
    "_alpha": 0.7, "_beta": 0.9, "_eps": 1e-06, "_max_priority": [7.25, 6.0], "_max_capacity": 16.0,
    "_schema_version": 1,
}  # fmt: skip


def weights(eps: float = 1e-6) -> np.ndarray[Any, Any]:
    """What TorchRL computes, in float32."""
    return ((torch.tensor(PRIORITIES) + eps) ** 0.7).double().numpy()


def folder(path: Path, metadata: dict[str, Any] = METADATA) -> Path:
    """Write what TorchRL writes of 11 of 16 elements."""
    np.concatenate([weights(), np.zeros(5)]).tofile(path / "sumtree.memmap")
    np.concatenate([weights(), np.full(5, FP32_MAX)]).tofile(path / "mintree.memmap")
    (path / "sampler_metadata.json").write_text(json.dumps(metadata))
    return path


def sampler(capacity: int = 16, **options: Any) -> PrioritizedSampler:
    return PrioritizedSampler(capacity, **({"alpha": 0.1, "beta": 0.1} | options))


def given(**options: Any) -> PrioritizedSampler:
    made = PrioritizedSampler(16, 0.7, 0.9, 1e-6, **options)
    made.update_priority(torch.arange(11), torch.tensor(PRIORITIES))
    return made


def test_a_folder_of_torchrl_is_read(tmp_path: Path) -> None:
    found = sampler()
    found.loads(folder(tmp_path))
    assert (found.alpha, found.beta, found.eps, found.default_priority) == (0.7, 0.9, 1e-6, 7.25)
    assert found.state_dict()["_sum_tree"].tolist() == [*weights(), 0, 0, 0, 0, 0]
    index, info = found.sample(TensorStorage(torch.arange(11)), 500)
    expected = (weights() / weights().min()) ** -0.9
    np.testing.assert_allclose(info["priority_weight"], expected[index], rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_folder_is_as_torchrl_writes_it(tmp_path: Path, dtype: torch.dtype) -> None:
    (tmp_path / "theirs").mkdir()
    theirs, ours = folder(tmp_path / "theirs"), tmp_path / "ours"
    given(dtype=dtype).dumps(ours)
    assert sorted(path.name for path in ours.iterdir()) == sorted(path.name for path in theirs.iterdir())
    for name in ("sumtree.memmap", "mintree.memmap"):
        np.testing.assert_allclose(np.fromfile(ours / name), np.fromfile(theirs / name), rtol=1e-6)
    assert (np.fromfile(ours / "mintree.memmap")[11:] == FP32_MAX).all()
    text = (ours / "sampler_metadata.json").read_text()
    assert text == json.dumps(METADATA)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("way", ["state", "folder"])
@pytest.mark.parametrize("within", [False, True])
def test_all_of_the_state_goes_round(tmp_path: Path, way: str, dtype: torch.dtype, within: bool) -> None:
    one, other = (make(dtype=dtype, max_priority_within_buffer=within) for make in (given, sampler))
    if way == "state":
        other.load_state_dict(one.state_dict())
    else:
        one.dumps(tmp_path)
        other.loads(tmp_path)
    storage = TensorStorage(torch.arange(16))
    for each in (one, other):
        each.update_priority([3, 6], [0.5, 0.25])
        each.extend(torch.tensor([12, 2]))
        each.alpha = 0.4
        each._rng = torch.Generator().manual_seed(3)
    assert other.default_priority == one.default_priority
    for _ in range(20):
        (index, info), (again, other_info) = (each.sample(storage, 50) for each in (one, other))
        assert torch.equal(index, again)
        assert torch.equal(info["priority_weight"], other_info["priority_weight"])


def test_a_state_does_not_change_with_the_sampler() -> None:
    one = given()
    state = one.state_dict()
    before = state["_sum_tree"].clone()
    one.update_priority(3, 100.0)
    assert torch.equal(state["_sum_tree"], before)
    assert all(isinstance(value, torch.Tensor | float | int) for value in state.values())


def test_elements_of_weight_zero_differ_from_those_never_written(tmp_path: Path) -> None:
    one = PrioritizedSampler(5, 1, 1, 0)
    one.update_priority(torch.arange(4), torch.tensor([1.0, 0, 2, 0]))
    one.dumps(tmp_path)
    assert np.fromfile(tmp_path / "mintree.memmap").tolist() == [1, 0, 2, 0, FP32_MAX]
    other = sampler(5)
    other.loads(tmp_path)
    index, _ = other.sample(TensorStorage(torch.arange(4)), 300)
    assert set(index.tolist()) == {0, 2}


def test_a_maximum_that_left_the_buffer_is_saved_with_its_element(tmp_path: Path) -> None:
    one = given(max_priority_within_buffer=True)
    one.update_priority(6, 0.5)
    one.dumps(tmp_path)
    value, number = json.loads((tmp_path / "sampler_metadata.json").read_text())["_max_priority"]
    assert (value, number) == (pytest.approx(2, rel=1e-5), 0)


@pytest.mark.parametrize(("within", "stored"), [(True, (7.25 + 1e-6) ** 0.7), (False, 7.25)])
def test_folders_of_before_versions_are_repaired(tmp_path: Path, within: bool, stored: float) -> None:
    metadata = {name: value for name, value in METADATA.items() if name != "_schema_version"}
    found = sampler(max_priority_within_buffer=within)
    found.loads(folder(tmp_path, metadata | {"_max_priority": [stored, 6.0]}))
    assert found.default_priority == pytest.approx(7.25, rel=1e-6)


@pytest.mark.parametrize("maximum", [None, [None, None]])
def test_folders_without_a_maximum_are_read(tmp_path: Path, maximum: Any) -> None:
    found = sampler()
    found.loads(folder(tmp_path, METADATA | {"_max_priority": maximum}))
    assert found.default_priority == 1
    assert found.alpha == 0.7


def test_a_folder_is_written_over(tmp_path: Path) -> None:
    folder(tmp_path)
    one = sampler(4)
    one.extend(torch.arange(4))
    one.dumps(tmp_path)
    other = sampler(4)
    other.loads(tmp_path)
    assert other.state_dict()["_sum_tree"].tolist() == [1] * 4


# Bad input ------------------------------------------------------------------------------------------


def refused(found: PrioritizedSampler, path: Path, kind: type[Exception], message: str) -> None:
    found.update_priority(torch.arange(11), torch.tensor(PRIORITIES))
    before = found.state_dict()
    with pytest.raises(kind, match=message) as caught:
        found.loads(path)
    assert isinstance(caught.value, RbtoolError)
    after = found.state_dict()
    assert all(torch.equal(torch.as_tensor(before[name]), torch.as_tensor(after[name])) for name in before)


def test_another_capacity_is_refused(tmp_path: Path) -> None:
    refused(sampler(20), folder(tmp_path), RuntimeError, "16 priorities.*max_capacity is 20")


@pytest.mark.parametrize(
    "change",
    [
        {"_alpha": -1},
        {"_alpha": float("nan")},
        {"_beta": None},
        {"_eps": "x"},
        {"_max_priority": 3},
        {"_max_priority": [-1, 2]},
        {"_max_priority": [1, 2, 3]},
        {"_max_capacity": "many"},
        {"_schema_version": 2},
        {"_schema_version": None},
    ],
)
def test_odd_numbers_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    refused(sampler(), folder(tmp_path, METADATA | change), CorruptDataError, "cannot be read")


@pytest.mark.parametrize("missing", [*METADATA][:5])
def test_missing_numbers_are_refused(tmp_path: Path, missing: str) -> None:
    metadata = {name: value for name, value in METADATA.items() if name != missing}
    refused(sampler(), folder(tmp_path, metadata), CorruptDataError, missing)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_odd_weights_are_refused(tmp_path: Path, weight: float) -> None:
    leaves = np.fromfile(folder(tmp_path) / "sumtree.memmap")
    leaves[3] = weight
    leaves.tofile(tmp_path / "sumtree.memmap")
    refused(sampler(), tmp_path, CorruptDataError, "weights outside of 0")


@pytest.mark.parametrize("name", ["sumtree.memmap", "mintree.memmap"])
def test_files_cut_short_or_missing_are_refused(tmp_path: Path, name: str) -> None:
    file = folder(tmp_path) / name
    file.write_bytes(file.read_bytes()[:-1])
    refused(sampler(), tmp_path, CorruptDataError, "127 bytes, expected 128")
    file.unlink()
    refused(sampler(), tmp_path, CorruptDataError, f"{name} is missing")


def test_metadata_that_are_no_json_are_refused(tmp_path: Path) -> None:
    (folder(tmp_path) / "sampler_metadata.json").write_text("{")
    refused(sampler(), tmp_path, ValueError, "not JSON")


def test_an_empty_folder_is_not_found(tmp_path: Path) -> None:
    refused(sampler(), tmp_path, DatasetNotFoundError, "holds no priorities")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_sum_tree": None}, "_sum_tree is missing"),
        ({"_sum_tree": torch.ones(4), "_min_tree": torch.ones(4)}, "4 priorities.*max_capacity is 16"),
        ({"_min_tree": torch.ones(4)}, "4 priorities"),
        ({"_sum_tree": [1.0] * 16}, "_sum_tree is a list"),
        ({"_max_priority": torch.tensor([1.0, 16.0])}, "_max_priority"),
        ({"_max_priority": torch.tensor([1.0, float("nan")])}, "_max_priority"),
        ({"_max_priority": torch.tensor([1.0, -float("inf")])}, "_max_priority"),
        ({"_beta": -1.0}, "beta is -1"),
        ({"_max_priority": torch.tensor([1.0])}, "_max_priority"),
    ],
)
def test_odd_states_are_refused(change: dict[str, Any], message: str) -> None:
    state = {name: value for name, value in (given().state_dict() | change).items() if value is not None}
    found = given()
    with pytest.raises(RuntimeError, match=message):
        found.load_state_dict(state)
    assert found.alpha == 0.7
