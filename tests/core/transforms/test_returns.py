"""Returns to go and dense rewards against a plain loop, also where rewards are NaN or infinite."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.errors import MissingKeyError, SchemaError, UsageError
from rbtool.core.format.returns import add_rewards_to_go
from rbtool.core.preprocess.operations.program import ProgramProcessor, program_of
from rbtool.core.preprocess.processor import Block, BlockColumn, Context, Pieces
from rbtool.core.samplers.sample_units import Sequence
from rbtool.core.samplers.slices import SliceSampler
from rbtool.core.storages.lazy_tensor import LazyTensorStorage
from rbtool.core.storages.list_storage import LazyStackStorage, ListStorage
from rbtool.core.ted.schema import Field, role_of
from rbtool.core.transforms.base import Transform
from rbtool.core.transforms.returns import DensifyReward, MultiStep, ReturnToGo

INF, NAN = math.inf, math.nan


def steps(rewards: list[float], ends: list[bool], **more: Any) -> TensorDict:
    after = {"reward": torch.tensor(rewards, dtype=torch.float64)[:, None], "done": torch.tensor(ends)[:, None]}
    return TensorDict({"next": after, **more}, [len(rewards)])


def to_go(td: TensorDict, gamma: float = 1.0) -> list[list[float]]:
    """The return to go, the same way from both transforms."""
    return [
        ReturnToGo(gamma)(td)["return_to_go"].flatten().tolist(),
        DensifyReward(discount=gamma)(td)["next", "reward"].flatten().tolist(),
    ]


def assert_to_go(td: TensorDict, expected: list[float], gamma: float = 1.0) -> None:
    for found in to_go(td, gamma):
        assert found == pytest.approx(expected, nan_ok=True)


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.booleans(), st.sampled_from([1.0, -2.5, 3.0, NAN, INF, -INF])), min_size=1, max_size=20),
    st.sampled_from([1.0, 0.5]),
)
def test_returns_are_those_of_a_loop(given_steps: list[tuple[bool, float]], gamma: float) -> None:
    total, expected = 0.0, []
    for end, reward in reversed(given_steps):
        total = reward + (0.0 if end else gamma * total)
        expected.append(total)
    ends, rewards = zip(*given_steps, strict=True)
    assert_to_go(steps(list(rewards), list(ends)), expected[::-1], gamma)


@pytest.mark.parametrize("odd", [NAN, INF, -INF])
def test_nan_and_infinity_stay_in_their_trajectory(odd: float) -> None:
    assert_to_go(steps([1, 2, odd, 4], [False, True, False, True]), [3, 2, odd, 4])


@pytest.mark.parametrize("odd", [NAN, INF, 5.0])
@pytest.mark.parametrize("key", ["mask", ("collector", "mask")])
def test_padding_counts_nothing(odd: float, key: Any) -> None:
    td = steps([1, 2, odd, odd], [False] * 4)
    td[key] = torch.tensor([True, True, False, False])
    assert_to_go(td, [3, 2, 0, 0])


@pytest.mark.parametrize("key", ["episode", "traj_ids", ("collector", "traj_ids")])
def test_returns_end_where_ids_change(key: Any) -> None:
    td = steps([1, 2, NAN, 4], [False] * 4)
    td[key] = torch.tensor([7, 7, 3, 3])
    assert_to_go(td, [3, 2, NAN, 4])


def test_each_row_of_a_batch_ends_by_any_flag() -> None:
    td = torch.stack([steps([1, 2, 4], [False] * 3), steps([1, 2, NAN], [False, True, False])])
    td["next", "truncated"] = torch.tensor([[True, False, False], [False, False, False]])[..., None]
    assert_to_go(td, [1, 6, 4, 3, 2, NAN])


def test_infinity_stays_infinite_however_far_it_is_discounted() -> None:
    td = steps([0.0] * 1199 + [INF], [False] * 1200)
    assert_to_go(td, [INF] * 1200, 0.5)
    assert MultiStep(0.5, 1200)(td)["next", "reward"].flatten().tolist() == [INF] * 1200


def test_without_a_future_the_return_is_the_reward() -> None:
    found = ReturnToGo(0.0)(steps([1, INF, NAN, 2], [False] * 4))["return_to_go"].flatten().tolist()
    assert found == pytest.approx([1, INF, NAN, 2], nan_ok=True)


@pytest.mark.parametrize(
    "named",
    [{"reward_key": ("next", "rewrad")}, {"done_keys": [("next", "doen")]}, {"done_keys": "d"}, {"mask_key": "m"}],
)
def test_a_misspelt_key_is_named(named: Any) -> None:
    with pytest.raises(MissingKeyError, match="is not in the batch"):
        ReturnToGo(**named)(steps([1, 2], [False, True]))


def test_a_named_mask_has_one_value_a_step() -> None:
    td = steps([1, 2], [False, True], legal=torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(SchemaError, match=r"legal is \[2, 3\]"):
        ReturnToGo(mask_key="legal")(td)


def test_dense_rewards_of_the_documented_case() -> None:
    td = steps([0.0, 0, 0, 1, 0, 0, 0, 2], [place in (3, 7) for place in range(8)])
    dense = [1.0] * 4 + [2] * 4
    kept = DensifyReward(reward_key_out="dense")(torch.stack((td, td)))
    assert kept["next", "dense"][1].flatten().tolist() == dense
    assert (kept["next", "reward"][1] == td["next", "reward"]).all()
    assert DensifyReward()(tensordict=td)["next", "reward"].flatten().tolist() == dense


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({}, (["reward", "done"], ["reward"])),
        ({"reward_key": "cost", "done_key": "over", "reward_key_out": "dense"}, (["cost", "over"], ["dense"])),
    ],
)
def test_dense_rewards_are_set_in_the_same_tensordict(options: dict[str, Any], keys: Any) -> None:
    td = steps([1.0, 2.0], [False, True])
    td["next", "cost"], td["next", "over"], reward = td["next", "reward"], td["next", "done"], td["next", "reward"]
    transform = DensifyReward(**options)
    assert transform(td) is td
    assert (transform.in_keys, transform.out_keys) == keys
    assert (td["next", keys[1][0]].tolist(), reward.tolist()) == ([[3.0], [2.0]], [[1.0], [2.0]])


def test_dense_rewards_of_stored_objects_are_not_stored() -> None:
    buffer = ReplayBuffer(
        storage=ListStorage(2), transform=DensifyReward(), collate_fn=lambda rows: rows[0], batch_size=1
    )
    buffer.extend([steps([1.0, 2.0], [False, True])])
    for batch in (buffer[0], buffer.sample(), buffer[0]):
        assert batch["next", "reward"].tolist() == [[3.0], [2.0]]


def test_dense_rewards_are_summed_along_the_time_dimension() -> None:
    td = TensorDict(
        {"next": {"reward": torch.tensor([[1.0, 10], [2, 20]])[..., None], "done": torch.zeros(2, 2, 1).bool()}}, [2]
    )
    for dim in (3, -3):
        assert DensifyReward(time_dim=dim)(td.copy())["next", "reward"].flatten().tolist() == [3, 30, 2, 20]
    assert DensifyReward()(td.copy())["next", "reward"].flatten().tolist() == [11, 10, 22, 20]
    with pytest.raises(SchemaError, match="without a dimension -4"):
        DensifyReward(time_dim=4)(td)


def test_dense_rewards_keep_infinities_and_types_and_refuse_other_shapes() -> None:
    td = steps([1.0, INF, 9.0], [True, False, False])
    assert DensifyReward(discount=0.5)(td.copy())["next", "reward"].isinf().flatten().tolist() == [False, True, False]
    td["next", "reward"] = torch.ones(3, 1, dtype=torch.int64)
    assert DensifyReward()(td.copy())["next", "reward"].dtype == torch.int64
    assert DensifyReward(discount=0.5)(td.copy())["next", "reward"].flatten().tolist() == [1, 1.5, 1]
    td["next", "reward"] = torch.ones(3)
    with pytest.raises(SchemaError, match="expected the same"):
        DensifyReward()(td)
    with pytest.raises(MissingKeyError, match="cost"):
        DensifyReward(reward_key="cost")(td)
    for wrong in ({"time_dim": 0}, {"discount": -0.5}, {"discount": 2}):
        with pytest.raises(UsageError):
            DensifyReward(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gamma", [0.97, 1.0])
def test_returns_are_those_of_the_operation_bit_for_bit(dtype: torch.dtype, gamma: float) -> None:
    rewards = torch.randn(20_000, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    ends = torch.zeros(20_000, 1, dtype=torch.bool)
    ends[torch.randint(20_000, (40,), generator=torch.Generator().manual_seed(1))] = True
    ends[-1] = True
    pieces = Pieces.of([0], [len(ends)], [True], [True])
    names: list[tuple[tuple[str, ...], torch.Tensor]] = [(("next", "reward"), rewards), (("next", "done"), ends)]
    columns = {key: BlockColumn(str(value.dtype).removeprefix("torch."), value.numpy()) for key, value in names}
    fields = [Field(key, column.dtype, (1,), role_of(key)) for key, column in columns.items()]
    processor = ProgramProcessor(program_of({"return_to_go": True, "gamma": gamma}), fields)
    made = processor.load(Context(fields, None, 0)).apply(Block(columns, pieces, 0))  # type: ignore[arg-type]
    td = TensorDict({"next": {"reward": rewards, "done": ends}}, [len(ends)])
    found = ReturnToGo(gamma)(td)["return_to_go"]
    assert found.dtype == dtype
    assert found.numpy().tobytes() == made.columns["return_to_go",].values.tobytes()
    assert DensifyReward(discount=gamma)(td)["next", "reward"].numpy().tobytes() == found.numpy().tobytes()


def test_gradients_reach_the_rewards() -> None:
    rewards = torch.ones(4, 1, requires_grad=True)
    td = TensorDict({"next": {"reward": rewards, "done": torch.tensor([[False], [True], [False], [False]])}}, [4])
    ReturnToGo(0.5)(td)["return_to_go"].sum().backward()
    assert rewards.grad is not None
    assert rewards.grad.flatten().tolist() == [1, 1.5, 1, 1.5]


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=8),
    st.sampled_from([1.0, 0.99, 1e-300]),
    st.integers(0, 2**32 - 1),
)
def test_returns_do_not_depend_on_how_many_are_summed_at_once(lengths: list[int], gamma: float, seed: int) -> None:
    draw = np.random.default_rng(seed)
    rewards = draw.normal(size=sum(lengths)) * 10.0 ** draw.integers(-300, 300, sum(lengths))
    rewards[draw.random(len(rewards)) < 0.05] = np.inf
    ends = np.zeros(len(rewards), dtype=bool)
    ends[np.cumsum(lengths) - 1] = True
    alone = rewards.copy()
    add_rewards_to_go(alone, ends, gamma)
    copies = 60  # of each trajectory, so that they are summed together
    many = np.tile(rewards, copies)
    add_rewards_to_go(many, np.tile(ends, copies), gamma)
    assert many.tobytes() == np.tile(alone, copies).tobytes()


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize(
    ("storage", "options"),
    [
        (LazyTensorStorage, {}),
        (LazyTensorStorage, {"strict_length": False, "pad_output": True}),
        (LazyTensorStorage, {"batched": True}),
        (ListStorage, {"strict_length": False, "pad_output": True}),
    ],
)
def test_returns_of_a_batch_of_slices_end_with_each_slice(
    storage: Any, options: dict[str, Any], ids: bool, kind: type[ReplayBuffer]
) -> None:
    """Neighbouring slices of a batch may come from one trajectory, and padding repeats a reward."""
    count = torch.arange(20)
    more = {"number": count, **({"episode": count // 10} if ids else {})}
    data = steps([1.0] * 20, (count % 10 == 9).tolist(), **more)
    generator = torch.Generator().manual_seed(0)
    sampler = SliceSampler(slice_len=4, **options)
    buffer = kind(storage=storage(20), sampler=sampler, batch_size=16, transform=ReturnToGo(), generator=generator)
    buffer.extend(data[:13])
    for _ in range(20):
        batch, info = buffer.sample(return_info=True)
        batch, mask = batch.reshape(-1, 4), torch.ones(4, 4, dtype=torch.bool)
        if (found := info.get(("collector", "mask"))) is not None:
            mask = found.reshape(4, 4)
        if kind is ReplayBuffer:  # which leaves the rest of the info out of its batches
            flags = {key for key, value in info.items() if getattr(value, "dtype", None) == torch.bool}
            assert set(batch.keys(True, True)) == {*data.keys(True, True), *flags, "return_to_go"}
        expected = mask.flip(-1).cumsum(-1).flip(-1)
        assert torch.equal(batch["return_to_go"].squeeze(-1)[mask], expected[mask].double())
    assert torch.equal(buffer[:]["number"], count[:13])
    assert not buffer[:]["next", "done"][:9].any()


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyStackStorage])
@pytest.mark.parametrize("shape", [(), (1,), (2, 1)])
def test_flags_of_slices_have_the_shape_of_the_stored_ones(kind: Any, storage: Any, shape: tuple[int, ...]) -> None:
    count = torch.arange(20)
    done = (count % 10 == 9).reshape(20, *[1] * len(shape)).expand(20, *shape).clone()
    after = {"reward": torch.ones(20, *shape), "done": done}
    data = TensorDict({"episode": count // 10, "number": count, "next": after}, [20])
    generator = torch.Generator().manual_seed(0)
    dense = DensifyReward(time_dim=len(shape) + 1)
    sampler = SliceSampler(slice_len=4, traj_key="episode")
    buffer = kind(storage=storage(20), sampler=sampler, batch_size=16, transform=dense, generator=generator)
    buffer.extend(data)
    batch = buffer.sample()
    expected = torch.arange(4, 0, -1.0).repeat(4).reshape(16, *[1] * len(shape)).expand(16, *shape)
    assert torch.equal(batch["next", "reward"], expected)
    if kind is ReplayBuffer:
        assert batch["next", "done"].shape == (16, *shape)
    assert torch.equal(buffer[:]["next", "done"], done)


@pytest.mark.parametrize(
    "change",
    [
        lambda batch: batch.clone(),
        lambda batch: batch.reshape(-1, 4),
        lambda batch: batch[4:],
        lambda batch: TensorDict(batch.to_dict(), batch.batch_size),
    ],
)
def test_functions_of_a_plain_buffer_see_the_stored_flags(change: Any) -> None:
    done = torch.arange(20) % 10 == 9
    data = steps([1.0] * 20, done.tolist(), number=torch.arange(20))
    buffer = ReplayBuffer(storage=LazyTensorStorage(20), sampler=SliceSampler(slice_len=4), batch_size=16)
    buffer.append_transform(change)
    buffer.extend(data)
    batch = buffer.sample()
    assert set(batch.keys(True, True)) == set(data.keys(True, True))
    assert torch.equal(batch["next", "done"], data["next", "done"][batch["number"]])


def test_a_transform_that_crosses_steps_gets_the_flags_of_slices() -> None:
    seen: list[set[Any]] = []

    class Crossing(Transform):
        crosses_steps = True

        def forward(self, data: Any) -> Any:
            seen.append(set(data.keys(True, True)))
            return data

    data = steps([1.0] * 20, (torch.arange(20) % 10 == 9).tolist())
    buffer = ReplayBuffer(storage=LazyTensorStorage(20), sampler=SliceSampler(slice_len=4), batch_size=16)
    buffer.append_transform(Crossing())
    buffer.extend(data)
    batch = buffer.sample()
    assert set(batch.keys(True, True)) == seen[0]
    assert seen[0] == {*data.keys(True, True), ("next", "truncated"), ("next", "terminated")}
    assert batch["next", "truncated"].reshape(4, 4)[:, -1].all()


@pytest.mark.parametrize("change", [ReturnToGo(reward_key="reward"), lambda batch: batch.clone()])
def test_flags_of_slices_that_a_batch_cannot_hold_are_left_out(change: Any) -> None:
    data = TensorDict({name: torch.ones(20) for name in ("episode", "next", "reward")}, [20])
    sampler = SliceSampler(slice_len=4, traj_key="episode")
    buffer = ReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler, batch_size=16, transform=change)
    buffer.extend(data)
    assert torch.equal(buffer.sample()["next"], torch.ones(16))


def test_returns_of_n_step_transitions_count_every_reward_once() -> None:
    done = torch.tensor([0, 0, 1, 0, 1]).bool().view(5, 1)
    after = {"observation": torch.arange(5.0), "reward": torch.arange(5.0).view(5, 1) + 1, "done": done}
    data = TensorDict({"observation": torch.arange(5.0), "next": after}, [5])
    windows = MultiStep(gamma=1.0, n_steps=3)(data)
    assert ReturnToGo()(windows)["return_to_go"].view(-1).tolist() == [6, 5, 3, 9, 5]
    assert torch.equal(ReturnToGo()(windows)["return_to_go"], ReturnToGo()(data)["return_to_go"])
    with pytest.raises(SchemaError, match=r"next\.reward holds sums over n steps, but next\.original_reward"):
        ReturnToGo()(windows.exclude(("next", "original_reward")))


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("transform", [ReturnToGo(), DensifyReward(), MultiStep(1.0, 9)])
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyStackStorage])
def test_returns_end_with_each_window_of_a_sequence(kind: Any, transform: Any, storage: Any) -> None:
    """Neighbouring windows of a batch may come from one trajectory, and steps are repeated where it ends."""
    data = steps([1.0] * 20, (torch.arange(20) % 10 == 9).tolist(), number=torch.arange(20))
    generator = torch.Generator().manual_seed(0)
    buffer = kind(
        storage=storage(20), batch_size=8, transform=transform, sample_unit=Sequence(4, burn_in=1), generator=generator
    )
    buffer.extend(data)
    entry = "return_to_go" if isinstance(transform, ReturnToGo) else ("next", "reward")
    for _ in range(10):
        batch, info = buffer.sample(return_info=True)
        real = info["validity_mask"].view(8, 5)
        left = real.flip(-1).cumsum(-1).flip(-1)
        assert torch.equal(batch[entry].view(8, 5)[real], left[real].double())
        assert batch["next", "truncated"].view(8, 5)[:, -1].all()
    plain = kind(storage=buffer.storage, batch_size=8, sample_unit=Sequence(4))
    assert ("next", "truncated") not in plain.sample().keys(True)
