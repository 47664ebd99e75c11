"""Beside TorchRL: its transforms and collectors with our buffers, and folders from here to there and back.

Its own prioritised sampler needs compiled trees, which are not in every build: what needs them skips without.
"""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, MemoryMappedTensor, NonTensorData, TensorDict
from waiting import HANG

import rbtool
from rbtool.core.buffers.tensordict import PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer
from rbtool.core.transforms.base import Compose

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("default")]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    data = pytest.importorskip("torchrl.data")
    transforms = pytest.importorskip("torchrl.envs.transforms")
    collectors = pytest.importorskip("torchrl.collectors")
    envs = pytest.importorskip("torchrl.envs")


def steps(count: int = 7) -> TensorDict:
    rows = torch.arange(count)
    inner = {"reward": rows.float().unsqueeze(-1), "done": torch.zeros(count, 1, dtype=torch.bool)}
    return TensorDict({"a": rows, "observation": rows.double().unsqueeze(-1), "next": inner}, [count])


def test_its_transforms_in_our_buffers() -> None:
    change = transforms.DoubleToFloat(in_keys=["observation"], in_keys_inv=["observation"])
    for made in (change, transforms.Compose(change), Compose(change)):
        buffer = rbtool.ReplayBuffer(storage=rbtool.LazyTensorStorage(10), transform=made, batch_size=4)
        buffer.extend(steps().set("observation", steps()["observation"].float()))
        assert buffer.storage[:]["observation"].dtype == torch.float64
        assert buffer[:]["observation"].dtype == buffer.sample()["observation"].dtype == torch.float32
    renamed = rbtool.TensorDictReplayBuffer(
        storage=rbtool.LazyTensorStorage(10), transform=transforms.RenameTransform(["a"], ["b"]), batch_size=4
    )
    renamed.extend(steps())
    assert torch.equal((batch := renamed.sample())["b"], batch["index"])


TEXTS: dict[str, Any] = {
    "shared": NonTensorData("x", [3]), "listed": ["x"] * 3, "tailed": NonTensorData("x", [3, 2]),
    "different": ["x", "y", "z" * 99], "different tails": [["x", "y"], ["z", "z"], ["x", None]],
}  # fmt: skip


@pytest.mark.parametrize("storage", ["ListStorage", "LazyTensorStorage", "LazyMemmapStorage", "LazyStackStorage"])
@pytest.mark.parametrize("form", TEXTS)
def test_text_is_read_as_there(storage: str, form: str) -> None:
    rows = TensorDict({"a": torch.zeros(3, 2), "s": TEXTS[form]}, [3, 2] if "tail" in form else [3])
    found = []
    for home in (rbtool, data):
        wrong = home is data and storage == "LazyMemmapStorage" and "different" in form  # it has the first text only
        made = getattr(home, "LazyTensorStorage" if wrong else storage)(5)
        buffer = home.TensorDictReplayBuffer(storage=made, sampler=home.SamplerWithoutReplacement(shuffle=False))
        buffer.extend(rows)
        index = torch.tensor([2, 0])
        parts = [buffer[:], buffer[0], buffer[1:], buffer[index], buffer.sample(2), buffer.storage.get(index[0].item())]
        found.append([(type(part["s"]), part["s"], part.get("s").shape) for part in parts])
    assert found[0] == found[1]


def test_text_that_it_saved(tmp_path: Path) -> None:
    buffer = data.TensorDictReplayBuffer(storage=data.LazyTensorStorage(5), batch_size=2)
    buffer.extend(TensorDict({"a": torch.arange(3), "s": ["x", "y", "z"]}, [3]))
    buffer.dumps(tmp_path)
    found = rbtool.TensorDictReplayBuffer(storage=rbtool.LazyTensorStorage(5), batch_size=2)
    found.loads(tmp_path)
    assert (found[:]["s"], found[:]["a"].tolist()) == (["x", "y", "z"], [0, 1, 2])


def arguments(ours: bool, **more: Any) -> dict[str, Any]:
    home = rbtool if ours else data
    storage = home.LazyTensorStorage(10, ndim=more.pop("ndim", 1))
    sampler = (rbtool if ours else data).SamplerWithoutReplacement()
    module = torch.nn.Linear(1, 1)
    return {"storage": storage, "sampler": sampler, "transform": _Add(module), "batch_size": 3, **more}


class _Add(torch.nn.Module):
    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: TensorDict) -> TensorDict:
        return batch.set("added", self.module(batch["next", "reward"]))


@pytest.mark.parametrize(("way", "ours_first"), [("folder", True), ("folder", False), ("state", False)])
@pytest.mark.parametrize("name", ["ReplayBuffer", "TensorDictReplayBuffer"])
def test_buffers_go_over(ours_first: bool, name: str, way: str, tmp_path: Path) -> None:
    homes = {True: rbtool, False: data}
    generator = torch.Generator().manual_seed(5)
    one = getattr(homes[ours_first], name)(**arguments(ours_first, generator=generator))
    other = getattr(homes[not ours_first], name)(**arguments(not ours_first, generator=torch.Generator()))
    one.extend(steps(13))
    one.sample()
    if way == "folder":
        if ours_first:
            one.storage.checkpointer = rbtool.TensorStorageCheckpointer(compatible=True)
        one.dumps(tmp_path / "saved")
        other.loads(tmp_path / "saved")
    else:
        other.load_state_dict(one.state_dict())
    assert (one[:] == other[:]).all()
    assert (len(other), other.write_count, other._writer._cursor, other.batch_size) == (10, 13, 3, 3)
    assert torch.equal(one._rng.get_state(), other._rng.get_state())
    assert [sorted(one.sample()["a"].tolist()) for _ in range(3)] == [
        sorted(other.sample()["a"].tolist()) for _ in range(3)
    ]
    other.extend(steps(2))
    assert other[:]["a"][3:5].tolist() == [0, 1]


def test_two_dimensions_go_over(tmp_path: Path) -> None:
    batch = TensorDict({"a": torch.arange(24).reshape(2, 12)}, [2, 12])
    ours = rbtool.TensorDictReplayBuffer(storage=rbtool.LazyMemmapStorage(20, ndim=2))
    theirs = data.TensorDictReplayBuffer(storage=data.LazyMemmapStorage(20, ndim=2))
    assert torch.equal(ours.extend(batch), theirs.extend(batch))
    assert (ours[:] == theirs[:]).all()
    ours.storage.checkpointer = rbtool.TensorStorageCheckpointer(compatible=True)
    ours.dumps(tmp_path / "ours")
    theirs.loads(tmp_path / "ours")
    assert (ours[:] == theirs[:]).all()
    theirs.dumps(tmp_path / "theirs")
    ours.loads(tmp_path / "theirs")
    assert (ours[:] == theirs[:]).all()
    assert json.loads((tmp_path / "ours/writer/metadata.json").read_text())["cursor"] == ours.writer._cursor == 2


@pytest.mark.parametrize("written", [False, True])
def test_torchrl_fails_on_our_own_form(tmp_path: Path, written: bool) -> None:
    ours = rbtool.ReplayBuffer(storage=rbtool.LazyTensorStorage(10))
    theirs = data.ReplayBuffer(storage=data.LazyTensorStorage(10))
    ours.extend(steps(13))
    ours.dumps(tmp_path / "saved")
    if written:
        theirs.extend(steps(3))
    with pytest.raises(FileNotFoundError, match=r"storage_metadata\.json"):
        theirs.loads(tmp_path / "saved")


# Buffers with priorities ---------------------------------------------------------------------------


EXPONENTS: dict[str, Any] = {"alpha": 0.7, "beta": 0.5, "eps": 1e-6}


def filled(home: Any, kind: Any, **more: Any) -> Any:
    buffer = kind(storage=home.LazyMemmapStorage(10), batch_size=4, **more)
    rows = torch.arange(13)
    for part in (rows[:8], rows[8:]):
        buffer.extend(TensorDict({"a": part, "next": {"reward": part.float().unsqueeze(-1)}}, [len(part)]))
    return buffer


def with_priorities(buffer: Any) -> Any:
    buffer.update_priority(torch.arange(10), torch.arange(10.0))
    return buffer


def drawn(buffer: Any) -> torch.Tensor:
    """The importance weights of all elements that are drawn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batch = buffer.sample(4_000)
    found = torch.zeros(10)
    found[batch["index"].reshape(-1)] = batch["priority_weight"].float()
    return found


@pytest.fixture
def theirs() -> Any:
    """A prioritised buffer of TorchRL's, where its trees can be had."""
    try:
        return filled(data, data.TensorDictPrioritizedReplayBuffer, **EXPONENTS)
    except RuntimeError as error:
        pytest.skip(f"TorchRL has no priority trees here: {error}")


def ours() -> Any:
    buffer = filled(rbtool, TensorDictPrioritizedReplayBuffer, **EXPONENTS)
    buffer.storage.checkpointer = rbtool.TensorStorageCheckpointer(compatible=True)
    return buffer


def test_our_folder_goes_over(theirs: Any, tmp_path: Path) -> None:
    buffer = with_priorities(ours())
    buffer.dumps(tmp_path / "saved")
    theirs.loads(tmp_path / "saved")
    assert (theirs[:] == buffer[:]).all()
    assert torch.allclose(drawn(theirs), drawn(buffer), rtol=1e-4)


def test_their_folder_comes_over(theirs: Any, tmp_path: Path) -> None:
    with_priorities(theirs).dumps(tmp_path / "saved")
    buffer = ours()
    buffer.loads(tmp_path / "saved")
    assert (theirs[:] == buffer[:]).all()
    assert torch.allclose(drawn(theirs), drawn(buffer), rtol=1e-4)


def test_our_folder_in_a_uniform_buffer_of_theirs(tmp_path: Path) -> None:
    buffer = with_priorities(ours())
    buffer.dumps(tmp_path / "saved")
    other = data.TensorDictReplayBuffer(storage=data.LazyMemmapStorage(10), batch_size=4)
    other.loads(tmp_path / "saved")
    assert (other[:] == buffer[:]).all()
    assert (len(other), other.write_count, other._writer._cursor) == (10, 13, 3)


def test_a_uniform_folder_of_theirs_in_our_prioritised_buffer(tmp_path: Path) -> None:
    other = filled(data, data.TensorDictReplayBuffer)
    other.dumps(tmp_path / "saved")
    buffer = with_priorities(ours())
    buffer.loads(tmp_path / "saved")
    assert (other[:] == buffer[:]).all()
    assert torch.equal(drawn(buffer), torch.ones(10))


@pytest.mark.parametrize("kind", [PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer])
def test_every_argument_of_theirs_is_one_of_ours(kind: Any) -> None:
    their = inspect.signature(getattr(data, kind.__name__).__init__).parameters
    for name, parameter in their.items():
        if name == "self" or parameter.kind is parameter.VAR_KEYWORD:
            continue
        value = {"alpha": 0.5, "beta": 0.5, "batch_size": 4}.get(name, parameter.default)
        assert kind(**{"alpha": 0.7, "beta": 0.4} | {name: value}) is not None
        mine = inspect.signature(kind.__init__).parameters
        if name in mine:
            assert mine[name].default == parameter.default


@pytest.mark.parametrize(
    "given",
    [
        {"service_backend": "thread"}, {"service_backend": 3}, {"service_backend": None}, {"transport": None},
        {"transport": "ray"}, {"transport": "direct"}, {"transport_options": {"timeout": 3}}, {"transport_options": {}},
        {"service_backend_options": {}}, {"service_backend_options": {"remote_config": {}}},
        {"use_ray_service": False}, {"use_ray_service": True, "service_backend": "direct"},
        {"service_backend": "ray", "service_backend_options": {"cpus": 3}},
    ],
)  # fmt: skip
def test_what_buffers_refuse_of_a_service_is_what_theirs_refuse(given: dict[str, Any]) -> None:
    found: list[type | None] = []
    for home in (rbtool, data):
        try:
            home.RemoteTensorDictReplayBuffer(storage=home.LazyTensorStorage(4), **given)
            found.append(None)
        except Exception as error:
            found.append(next(kind for kind in (ValueError, TypeError, Exception) if isinstance(error, kind)))
    assert found[0] is found[1]


def test_a_buffer_that_was_shut_down_is_not_started_here_or_there() -> None:
    for home in (rbtool, data):
        buffer = home.ReplayBuffer(storage=home.LazyTensorStorage(4))
        assert (buffer.start(), buffer.client(), buffer.service_backend) == (buffer, buffer, "direct")
        buffer.shutdown()
        buffer.extend(torch.arange(2))
        with pytest.raises(RuntimeError):
            buffer.start()
        assert not buffer.is_alive


# Collectors of TorchRL fill our buffers of one to three dimensions ---------------------------------


N, FRAMES, IDS = 400, 80, ("collector", "traj_ids")
# Before TorchRL 0.11 the names were longer.
Collector = getattr(collectors, "Collector", None) or collectors.SyncDataCollector
MultiSyncCollector = getattr(collectors, "MultiSyncCollector", None) or collectors.MultiSyncDataCollector
make_env = partial(envs.GymEnv, "CartPole-v1", device="cpu")
SETUPS: dict[str, tuple[Any, int, tuple[int, ...]]] = {
    "one environment": (lambda: Collector(make_env(), None, **HOW), 1, (N,)),
    "a batched environment": (lambda: Collector(envs.SerialEnv(4, make_env), None, **HOW), 2, (100, 4)),
    "several processes": (lambda: MultiSyncCollector([make_env] * 2, None, cat_results="stack", **HOW), 2, (200, 2)),
    "several processes of batched ones": (
        lambda: MultiSyncCollector([partial(envs.SerialEnv, 2, make_env)] * 2, None, cat_results="stack", **HOW),
        3,
        (100, 2, 2),
    ),
}
HOW = {"frames_per_batch": FRAMES, "total_frames": 10 * FRAMES}


def collected(make: Any) -> Iterator[Any]:
    collector = make()
    try:
        yield from collector
    finally:
        collector.shutdown()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SETUPS)
def test_slices_are_steps_of_one_trajectory(name: str) -> None:
    make, ndim, shape = SETUPS[name]
    memory = rbtool.ReplayBuffer(
        storage=rbtool.LazyTensorStorage(N, ndim=ndim),
        sampler=rbtool.SliceSampler(num_slices=4, traj_key=IDS),
        batch_size=16,
    )
    for batch in collected(make):
        memory.extend(batch)
    assert (len(memory), tuple(memory.storage.shape)) == (N, shape)
    for _ in range(20):
        batch = memory.sample().view(4, 4)
        assert bool((batch[IDS].diff(dim=1) == 0).all())
        assert torch.equal(batch["observation"][:, 1:], batch["next", "observation"][:, :-1])


@pytest.mark.filterwarnings("ignore")
def test_single_transitions_of_flat_data() -> None:
    memory = rbtool.ReplayBuffer(storage=rbtool.LazyTensorStorage(N))
    for batch in collected(SETUPS["a batched environment"][0]):
        memory.extend(batch.reshape(-1))
    assert (len(memory), memory.sample(32).shape) == (N, (32,))


@pytest.mark.filterwarnings("ignore")
def test_a_transform_that_flattens_does_so_to_batches() -> None:
    memory = rbtool.ReplayBuffer(storage=rbtool.LazyTensorStorage(N), transform=lambda data: data.reshape(-1))
    for batch in collected(SETUPS["a batched environment"][0]):
        memory.extend(batch)  # 4 elements of 20 steps
    assert (len(memory), memory.sample(8).shape) == (40, (160,))


@pytest.mark.filterwarnings("ignore")
def test_a_collector_writes_into_our_buffer_itself() -> None:
    memory = rbtool.TensorDictReplayBuffer(storage=rbtool.LazyTensorStorage(N), batch_size=16)
    collector = Collector(make_env(), None, replay_buffer=memory, **HOW)
    seen = [(data, memory.write_count) for data in collector]
    collector.shutdown()
    assert seen == [(None, count) for count in range(FRAMES, 11 * FRAMES, FRAMES)]
    assert (len(memory), len(memory.sample())) == (N, 16)


def test_collectors_fill_the_buffers_of_both_alike() -> None:
    script = Path(__file__).with_name("collector_checks.py")
    found = [
        subprocess.run([sys.executable, script, library], capture_output=True, text=True, timeout=HANG, check=True)
        for library in ("torchrl.data", "rbtool")
    ]
    assert found[0].stdout == found[1].stdout != ""


def _episodes(*lengths: int) -> TensorDict:
    done = torch.cat([torch.arange(length) == length - 1 for length in lengths])[:, None]
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return TensorDict({"episode": ids, "next": {"done": done, "reward": torch.ones(len(ids), 1)}}, [len(ids)])


def _keys_of_slices(home: Any, lengths: tuple[int, ...], *left_out: str) -> Any:
    sampler = home.SliceSampler(slice_len=3, pad_output=True, strict_length=False)
    buffer = home.TensorDictReplayBuffer(storage=home.LazyTensorStorage(20), sampler=sampler, batch_size=6)
    buffer.extend(_episodes(*lengths).exclude(*left_out))
    before = sampler.traj_key, sampler.end_key
    return before, ("collector", "mask") in buffer.sample().keys(True), sampler.traj_key, sampler.end_key


def _views(home: Any, folder: Path) -> Any:
    buffer = home.ReplayBuffer(storage=home.LazyMemmapStorage(5, scratch_dir=folder), batch_size=2)
    buffer.extend(torch.arange(4))
    reads = (buffer[:], buffer[1], buffer[1:3], buffer.storage.get(slice(2)), buffer.storage._storage)
    seen = [(isinstance(read, MemoryMappedTensor), Path(read.filename).name, read.shape) for read in reads]
    return seen, type(buffer.sample())


def _lanes(home: Any, kind: str) -> Any:
    left, right = (TensorDict({"x": torch.ones(5, count)}, [5]) for count in (4, 3))
    buffer = home.TensorDictReplayBuffer(storage=getattr(home, kind)(10), batch_size=3)
    buffer.extend(LazyStackedTensorDict(left, right.set("own", torch.ones(5)), stack_dim=1))
    parts = buffer[:], buffer.sample(), buffer[0]
    return [(type(part), part.batch_size, [sorted(one.keys()) for one in part.tensordicts]) for part in parts]


def _empty(home: Any) -> Any:
    buffer = home.TensorDictReplayBuffer(storage=home.TensorStorage(TensorDict(batch_size=[9])), batch_size=4)
    before, index = len(buffer), buffer.extend(_episodes(3)).tolist()
    return before, index, len(buffer), buffer[:]["next", "reward"].flatten().tolist(), buffer.sample().batch_size


def _new_entry(home: Any) -> Any:
    buffer = home.ReplayBuffer(storage=home.LazyTensorStorage(9), batch_size=4)
    buffer.extend(_episodes(5))
    buffer[3:4] = _episodes(1).set("value", torch.ones(1))
    return buffer[:]["value"].tolist()


def _dense_rewards(home: Any) -> Any:
    rewards, td = home.DensifyReward(), _episodes(2, 3)
    return rewards(td) is td, rewards.in_keys, rewards.out_keys, td["next", "reward"].flatten().tolist()


def _without_rows(home: Any) -> Any:
    buffer = home.TensorDictReplayBuffer(storage=home.LazyTensorStorage(9))
    with pytest.raises(IndexError):
        buffer.extend(_episodes(3)[:0])
    buffer.extend(_episodes(3))
    index = buffer.extend(_episodes(3)[:0])
    return index.shape, index.dtype, len(buffer), buffer.write_count


def _submitted(home: Any) -> Any:
    writer = home.TensorDictRoundRobinWriter(track_generations=True)
    buffer = home.TensorDictReplayBuffer(storage=home.LazyTensorStorage(4), writer=writer, batch_size=4, prefetch=2)
    index = buffer.extend(_episodes(4))
    buffer.sample()
    handle = {"index": index, "generation": buffer.writer.generations_of(index)}
    found = buffer.submit_update_if_present(**handle, patch={("next", "reward"): torch.zeros(4, 1)}).result()
    buffer.synchronize()
    return found.updated.tolist(), [float(buffer.sample()["next", "reward"].sum()) for _ in range(4)]


def _transformed(home: Any, invert: bool, **methods: int) -> Any:
    def added(number: int) -> Any:
        return lambda _, td: td.set("episode", td["episode"] * 10 + number)

    kind = type("Custom", (transforms.Transform,), {name: added(number) for name, number in methods.items()})
    buffer = home.TensorDictReplayBuffer(storage=home.LazyTensorStorage(9), batch_size=3)
    buffer.append_transform(kind(), invert=invert)
    given = _episodes(1, 1)
    buffer.extend(given)
    buffer.add(_episodes(1)[0])
    buffer[1:2] = _episodes(1)
    return [(td["episode"].tolist(), sorted(td.keys())) for td in (given, buffer.storage[:], buffer[:], buffer[0:2])]


def _goals(home: Any, strategy: str) -> Any:
    torch.manual_seed(3)
    buffer = home.HERReplayBuffer(
        lambda td: (td["goal"] - td["achieved"]).abs(), strategy=strategy, goal_key="goal",
        achieved_goal_key="achieved", storage=home.LazyTensorStorage(20), batch_size=8,
    )  # fmt: skip
    count = torch.arange(15.0).unsqueeze(-1)
    buffer.extend(_episodes(4, 5, 6).set("goal", -count).set("achieved", count))
    return [buffer.sample()["goal"].flatten().tolist() for _ in range(3)]


def _first_steps(home: Any, name: str, key: Any) -> Any:
    torch.manual_seed(0)
    sampler = getattr(home, name)(slice_len=2, init_key=key)
    buffer = home.TensorDictReplayBuffer(storage=home.LazyTensorStorage(20), sampler=sampler, batch_size=4)
    buffer.extend(_episodes(4, 5).set("is_init", torch.zeros(9, 1).bool()).set("first", torch.zeros(9, 1).bool()))
    batch = buffer.sample()
    return [batch[entry].flatten().tolist() for entry in ("index", "is_init", "first")]


def _tokens(home: Any, bins: int) -> Any:
    low, high = torch.tensor([-1.0, -0.3]), torch.tensor([1.0, 0.7])
    tokenizer = home.UniformActionTokenizer(bins, low=low, high=high)
    tokens = tokenizer.encode(
        torch.arange(-1000, 1001).div(1000).unsqueeze(-1).expand(-1, 2)
    )  # many are bounds of bins
    return tokens.tolist(), tokenizer.decode(tokens).tolist(), tokenizer.low.dtype


def _not_built(home: Any) -> Any:
    made = (
        home.ReplayBuffer(storage=one, delayed_init=True) for one in (home.ListStorage(5), lambda: home.ListStorage(5))
    )
    return [buffer.stats() for buffer in made]


@pytest.mark.parametrize(
    "act",
    [
        *(partial(_keys_of_slices, lengths=lengths) for lengths in ((5, 5), (2, 5))),
        lambda home: _keys_of_slices(home, (5, 5), "episode"),
        *(partial(_lanes, kind=kind) for kind in ("LazyTensorStorage", "LazyMemmapStorage")),
        _empty, _new_entry, _dense_rewards, _not_built, _without_rows, _submitted,
        *(
            partial(_transformed, invert=invert, **methods)
            for invert in (False, True)
            for methods in ({"_call": 1}, {"_inv_call": 2}, {"inv": 3}, {"inv": 3, "_inv_call": 2}, {"_step": 4})
        ),
        partial(_transformed, invert=False, forward=5, _call=1),
        *(partial(_goals, strategy=strategy) for strategy in ("future", "final", "episode", "random")),
        *(
            partial(_first_steps, name=name, key=key)
            for name in ("SliceSampler", "SliceSamplerWithoutReplacement")
            for key in ("is_init", "first", "unknown", None)
        ),
        *(partial(_tokens, bins=bins) for bins in (8, 255, 256)),
        lambda home: isinstance(home.SliceSampler(slice_len=2, replacement=False), home.SamplerWithoutReplacement),
    ],
)  # fmt: skip
def test_what_users_see_is_the_same(act: Any) -> None:
    assert act(rbtool) == act(data)


def test_views_of_memory_maps_are_the_same(tmp_path: Path) -> None:
    assert _views(rbtool, tmp_path / "ours") == _views(data, tmp_path / "theirs")
