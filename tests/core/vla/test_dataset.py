"""Metadata of robot datasets, the containers of steps, and what is wrong with a step."""

from __future__ import annotations

import importlib
import json
import pickle
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorClass, TensorDict

import rbtool
from rbtool import (
    Bounded,
    FormatError,
    RobotDatasetMetadata,
    Unbounded,
    UsageError,
    VLAAction,
    VLAImages,
    VLAObservation,
    validate_vla_tensordict,
)

THEIRS = """{"dataset_id": "bridge", "action_dim": 2, "action_low": [-1, -2], "action_high": [1, 2],
"camera_keys": [["observation", "image"], "wrist"], "action_names": ["a", "b"], "action_space": "eef_delta",
"state_key": ["observation", "state"], "action_key": "action", "license": null, "newer": 1}"""


def full() -> RobotDatasetMetadata:
    return RobotDatasetMetadata(
        "bridge", action_dim=2, action_low=[-1, -2], action_high=torch.tensor([1, 2]), action_mean=0.5,
        action_std=torch.ones(2, dtype=torch.float64), camera_keys=[("observation", "image"), "wrist"],  # type: ignore[arg-type]
        action_names=("a", "b"), gripper_mode="binary", control_frequency_hz=5, license="MIT",
    )  # fmt: skip


def test_metadata_statistics_become_floats() -> None:
    metadata = full()
    kinds = [value.dtype for value in (metadata.action_low, metadata.action_high, metadata.action_mean)]
    assert {*kinds} == {torch.float32}
    assert metadata.action_std.dtype == torch.float64
    read = RobotDatasetMetadata.from_json(THEIRS)
    assert read.action_low.dtype == torch.float32
    assert read.action_low.tolist() == [-1.0, -2.0]
    assert read.camera_keys == (("observation", "image"), "wrist")


def test_metadata_specs_have_the_bounds() -> None:
    spec = full().make_action_spec(shape_prefix=(3,))
    assert isinstance(spec, Bounded)
    assert spec.shape == (3, 2)
    assert spec.is_in(torch.tensor([[1.0, -2.0]] * 3))
    assert not spec.is_in(torch.tensor([[1.5, -2.0]] * 3))
    assert isinstance(RobotDatasetMetadata("x", action_dim=3, action_low=0).make_action_spec(), Unbounded)
    with pytest.raises(ValueError, match="action_dim"):
        RobotDatasetMetadata("x").make_action_spec()


def test_metadata_of_equal_values_is_equal() -> None:
    values: dict[str, Any] = {"action_dim": 2, "action_low": [-1, 0], "action_high": [1, 5], "camera_keys": ("front",)}
    one, other = RobotDatasetMetadata("bridge", **values), RobotDatasetMetadata("bridge", **values)
    assert one == other == RobotDatasetMetadata.from_json(one.to_json())
    assert one == RobotDatasetMetadata.from_dict(one.to_dict())
    assert len({one, other}) == 1
    changes: list[dict[str, Any]] = [{"action_low": [-1, 1]}, {"action_low": None}, {"license": "mit"}]
    assert all(one != RobotDatasetMetadata("bridge", **values | change) for change in changes)
    assert one != "bridge"


def test_metadata_are_compared_field_by_field() -> None:
    one = RobotDatasetMetadata("bridge", action_dim=2, action_low=[-1, 0], action_high=[1, 5])
    other = RobotDatasetMetadata("bridge", action_dim=2, action_low=[-1, 1], action_high=[1, 5], license="MIT")
    compared = one == other
    assert isinstance(compared, RobotDatasetMetadata)
    assert (compared.action_low.tolist(), bool(compared.dataset_id), bool(compared.license)) == (
        [True, False], True, False,
    )  # fmt: skip
    assert (bool(compared), bool(compared.all()), bool(one == one.clone()), bool((one == one.clone()).all())) == (
        False, False, True, True,
    )  # fmt: skip
    assert not one == RobotDatasetMetadata("bridge", action_dim=3, action_low=[-1, 0, 0])  # noqa: SIM201
    assert bool((one != other).any())


@pytest.mark.parametrize(
    "copied",
    [
        lambda one: one.clone(), lambda one: one.to("cpu"), lambda one: pickle.loads(pickle.dumps(one)),
        lambda one: torch.stack([one, one])[1], lambda one: one.unsqueeze(0)[0],
        lambda one: RobotDatasetMetadata(**one.to_dict(), batch_size=[]),
        lambda one: RobotDatasetMetadata.from_tensordict(one.to_tensordict()),
    ],
)  # fmt: skip
def test_metadata_are_a_tensorclass(copied: Any) -> None:
    one = full()
    assert isinstance(one, TensorClass)
    assert (one.batch_size, one.device) == (torch.Size([]), None)
    copy = copied(one)
    assert (copy.batch_size, copy.camera_keys, copy.license) == (torch.Size([]), one.camera_keys, "MIT")
    assert copy == one


def test_metadata_documents_go_round(tmp_path: Path) -> None:
    metadata = full()
    text = metadata.to_json(tmp_path / "metadata.json")
    for source in (text, tmp_path / "metadata.json", str(tmp_path / "metadata.json")):
        read = RobotDatasetMetadata.from_json(source)
        assert json.loads(read.to_json()) == json.loads(text)
        assert read.camera_keys == metadata.camera_keys
        assert torch.equal(read.action_high, metadata.action_high)


@pytest.mark.parametrize("source", ["{", '{"action_dim": 3}', '{"dataset_id": 3}'])
def test_metadata_documents_that_are_none_are_refused(source: str, tmp_path: Path) -> None:
    (tmp_path / "document.json").write_text(source)
    for given in (source, tmp_path / "document.json"):
        with pytest.raises(FormatError):
            RobotDatasetMetadata.from_json(given)
    with pytest.raises(FileNotFoundError):
        RobotDatasetMetadata.from_json(tmp_path / "missing.json")


@pytest.mark.parametrize(
    "values",
    [
        {"action_space": "other"}, {"gripper_mode": "open"}, {"action_dim": 0}, {"action_dim": 2.0},
        {"action_dim": True}, {"action_names": ("a",)}, {"action_mean": [1.0, float("nan")]},
        {"action_mean": [1.0, 2.0, 3.0]}, {"action_mean": [[1.0, 2.0]]}, {"action_mean": "many"},
        {"action_low": [0, 2], "action_high": [1, 1]}, {"control_frequency_hz": 0},
    ],
)  # fmt: skip
def test_metadata_with_invalid_values_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        RobotDatasetMetadata("x", **{"action_dim": 2, **values})


KEYS = ("language_instruction", "action", ("observation", "image"), ("observation", "state"))


def steps(**changes: Any) -> TensorDict:
    """Sound steps with other entries; None takes one out. Nested names are joined by two underscores."""
    found = TensorDict(
        {
            "language_instruction": NonTensorData("pick it up", batch_size=[2]),
            "action": torch.zeros(2, 7),
            "observation": {"image": torch.zeros(2, 3, 4, 4, dtype=torch.uint8), "state": torch.zeros(2, 5)},
        },
        [2],
    )
    for name, value in changes.items():
        key = tuple(name.split("__"))
        del found[key]
        if value is not None:
            found.set(key, value)
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"observation__image": None},
        {"observation__state": None},
        {"language_instruction": torch.tensor([[1, 2], [3, 4]])},
        {"language_instruction": NonTensorStack("one", "two")},
        {"action": torch.zeros(2, 7, dtype=torch.int64)},
    ],
)
def test_steps_that_are_sound(changes: dict[str, Any]) -> None:
    assert validate_vla_tensordict(steps(**changes)) == []


@pytest.mark.parametrize(
    ("changes", "issue"),
    [
        ({"language_instruction": None}, "'language_instruction' is missing: the language instruction"),
        ({"language_instruction": NonTensorData("  ", batch_size=[2])}, "is blank: an empty language instruction"),
        ({"language_instruction": NonTensorStack("one", "")}, "of step 1 is blank"),
        ({"language_instruction": NonTensorData(3, batch_size=[2])}, "is a int, expected text"),
        ({"language_instruction": torch.zeros(2)}, "expected text or tokens"),
        ({"action": None}, "missing action: there is no 'action'"),
        ({"action": torch.full((2, 7), torch.nan)}, "'action' has non-finite values"),
        ({"action": torch.zeros(2, 0)}, "no values"),
        ({"action": NonTensorData("up", batch_size=[2])}, "expected numbers"),
        ({"observation__image": None, "observation__state": None}, "'observation.image' and 'observation.state'"),
        ({"observation": torch.zeros(2, 3)}, "there is no perception"),
    ],
)
def test_steps_that_are_not_sound(changes: dict[str, Any], issue: str) -> None:
    (found,) = validate_vla_tensordict(steps(**changes), raise_on_error=False)
    assert issue in found
    for error in (ValueError, RuntimeError):
        with pytest.raises(error):
            validate_vla_tensordict(steps(**changes))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("instruction_key", "'action.x' is missing: the language instruction"),
        ("action_key", "missing action: there is no 'action.x'"),
        ("image_key", ""),
        ("state_key", ""),
    ],
)
def test_a_key_that_leads_into_a_tensor_is_missing(name: str, words: str) -> None:
    options: dict[str, Any] = {name: ("action", "x")}
    assert validate_vla_tensordict(steps(), **options, raise_on_error=False) == ([words] if words else [])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OBSERVATION_KEY", "observation"), ("IMAGE_KEY", ("observation", "image")),
        ("STATE_KEY", ("observation", "state")), ("INSTRUCTION_KEY", "language_instruction"), ("ACTION_KEY", "action"),
        ("VLA_ACTION_KEY", "vla_action"), ("ACTION_CHUNK_KEY", ("vla_action", "chunk")),
        ("ACTION_TOKENS_KEY", ("vla_action", "tokens")), ("ACTION_IS_PAD_KEY", "action_is_pad"),
    ],
)  # fmt: skip
def test_the_keys_of_steps_have_names(name: str, value: Any) -> None:
    assert getattr(rbtool, name) == getattr(importlib.import_module("rbtool.data.vla"), name) == value


@pytest.mark.peer
@pytest.mark.filterwarnings("default")
def test_the_names_are_torchrls() -> None:
    theirs = pytest.importorskip("torchrl.data.vla")
    names = {name for name in dir(theirs) if name.endswith("_KEY")} | {"ActionSpace", "GripperMode"}
    assert len(names) == 11
    assert all(getattr(rbtool, name) == getattr(theirs, name) for name in names)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("action_space", "joint_delta joint_position eef_delta eef_pose velocity mixed unknown"),
        ("gripper_mode", "continuous binary none unknown"),
    ],
)
def test_the_words_of_metadata_have_names(name: str, words: str) -> None:
    known = {"action_space": rbtool.ActionSpace, "gripper_mode": rbtool.GripperMode}[name]
    assert get_args(known) == tuple(words.split())
    for word in get_args(known):
        assert getattr(RobotDatasetMetadata("x", **{name: word}), name) == word


def test_steps_may_lack_what_is_not_required() -> None:
    nothing = TensorDict({}, [2])
    assert len(validate_vla_tensordict(nothing, raise_on_error=False)) == 3
    optional = {"require_instruction": False, "require_action": False, "require_perception": False}
    assert validate_vla_tensordict(nothing, **optional) == []  # type: ignore[arg-type]
    broken = steps(action=torch.full((2, 7), torch.nan))
    assert len(validate_vla_tensordict(broken, raise_on_error=False, **optional)) == 1  # type: ignore[arg-type]
    assert validate_vla_tensordict(broken, check_finite=False) == []
    with pytest.raises(ValueError, match="the steps are a dict"):
        validate_vla_tensordict({})  # type: ignore[arg-type]


def test_vla_containers_are_indexed_and_stacked() -> None:
    images = VLAImages(image=torch.zeros(2, 3, 4, 4), batch_size=[2])
    observation = VLAObservation(images=images, state=torch.arange(2), instruction="pick", batch_size=[2])
    assert observation[1].state == 1
    assert observation[1].instruction == "pick"
    assert observation[0].images.image.shape == (3, 4, 4)
    assert torch.stack([observation, observation]).batch_size == (2, 2)
    action = VLAAction(chunk=torch.zeros(2, 8, 7), padded=True, batch_size=[2])
    assert action.tokens is None
    assert action.padded is True
    assert action[0].chunk.shape == (8, 7)
