"""Metadata of robot datasets: values that are taken and refused, specs, and documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rbtool import Bounded, FormatError, RobotDatasetMetadata, Unbounded, UsageError

THEIRS = """{"dataset_id": "bridge", "action_dim": 2, "action_low": [-1, -2], "action_high": [1, 2],
"camera_keys": [["observation", "image"], "wrist"], "action_names": ["a", "b"], "action_space": "eef_delta",
"state_key": ["observation", "state"], "action_key": "action", "license": null, "newer": 1}"""


def full() -> RobotDatasetMetadata:
    return RobotDatasetMetadata(
        "bridge", action_dim=2, action_low=[-1, -2], action_high=torch.tensor([1, 2]), action_mean=0.5,
        action_std=torch.ones(2, dtype=torch.float64), camera_keys=[("observation", "image"), "wrist"],  # type: ignore[arg-type]
        action_names=("a", "b"), gripper_mode="binary", control_frequency_hz=5, license="MIT",
    )  # fmt: skip


def test_integer_statistics_become_floats() -> None:
    metadata = full()
    assert [value.dtype for value in (metadata.action_low, metadata.action_high, metadata.action_mean)] == [
        torch.float32
    ] * 3
    assert metadata.action_std.dtype == torch.float64
    read = RobotDatasetMetadata.from_json(THEIRS)
    assert read.action_low.dtype == torch.float32
    assert read.action_low.tolist() == [-1.0, -2.0]
    assert read.camera_keys == (("observation", "image"), "wrist")


def test_specs_have_the_bounds() -> None:
    spec = full().make_action_spec(shape_prefix=(3,))
    assert isinstance(spec, Bounded)
    assert spec.shape == (3, 2)
    assert spec.is_in(torch.tensor([[1.0, -2.0]] * 3))
    assert not spec.is_in(torch.tensor([[1.5, -2.0]] * 3))
    assert isinstance(RobotDatasetMetadata("x", action_dim=3, action_low=0).make_action_spec(), Unbounded)
    with pytest.raises(ValueError, match="action_dim"):
        RobotDatasetMetadata("x").make_action_spec()


def test_equal_ones_are_equal() -> None:
    values: dict[str, Any] = {"action_dim": 2, "action_low": [-1, 0], "action_high": [1, 5], "camera_keys": ("front",)}
    one, other = RobotDatasetMetadata("bridge", **values), RobotDatasetMetadata("bridge", **values)
    assert one == other == RobotDatasetMetadata.from_json(one.to_json())
    assert len({one, other}) == 1
    changes: list[dict[str, Any]] = [{"action_low": [-1, 1]}, {"action_low": None}, {"license": "mit"}]
    assert all(one != RobotDatasetMetadata("bridge", **values | change) for change in changes)
    assert one != "bridge"


def test_documents_go_round(tmp_path: Path) -> None:
    metadata = full()
    text = metadata.to_json(tmp_path / "metadata.json")
    for source in (text, tmp_path / "metadata.json", str(tmp_path / "metadata.json")):
        read = RobotDatasetMetadata.from_json(source)
        assert json.loads(read.to_json()) == json.loads(text)
        assert read.camera_keys == metadata.camera_keys
        assert torch.equal(read.action_high, metadata.action_high)


@pytest.mark.parametrize("source", ["{", '{"action_dim": 3}', '{"dataset_id": 3}'])
def test_documents_that_are_none(source: str, tmp_path: Path) -> None:
    (tmp_path / "document.json").write_text(source)
    for given in (source, tmp_path / "document.json"):
        with pytest.raises(FormatError):
            RobotDatasetMetadata.from_json(given)
    with pytest.raises(FileNotFoundError):
        RobotDatasetMetadata.from_json(tmp_path / "missing.json")


@pytest.mark.parametrize(
    "values",
    [
        {"action_space": "other"},
        {"gripper_mode": "open"},
        {"action_dim": 0},
        {"action_dim": 2.0},
        {"action_dim": True},
        {"action_names": ("a",)},
        {"action_mean": [1.0, float("nan")]},
        {"action_mean": [1.0, 2.0, 3.0]},
        {"action_mean": [[1.0, 2.0]]},
        {"action_mean": "many"},
        {"action_low": [0, 2], "action_high": [1, 1]},
        {"control_frequency_hz": 0},
    ],
)
def test_invalid_values(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        RobotDatasetMetadata("x", **{"action_dim": 2, **values})
