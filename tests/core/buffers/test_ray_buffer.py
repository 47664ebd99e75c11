"""Buffers in Ray actors, on a Ray of this machine, and parcels that bring data to them."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from source_tree import ROOT
from tensordict import NonTensorData, TensorDict
from torch.utils.data import DataLoader
from waiting import HANG

import rbtool
from rbtool.core.buffers.ensemble import ReplayBufferEnsemble
from rbtool.core.buffers.ray_buffer import BufferLostError, Parcel, RayReplayBuffer, joined, opened_small, small, split
from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.buffers.tensordict import TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer
from rbtool.core.errors import NetworkError, SchemaError, UsageError
from rbtool.core.open_steps import open_steps
from rbtool.core.samplers.slices import SliceSampler
from rbtool.core.samplers.uniform import RandomSampler, SamplerWithoutReplacement
from rbtool.core.storages.lazy_tensor import LazyTensorStorage
from rbtool.core.storages.list_storage import ListStorage
from rbtool.core.testing.datasets import write_walks
from rbtool.core.verbs.ray_data import write_blocks
from rbtool.core.writers.round_robin import TensorDictRoundRobinWriter

NO_RAY = "Ray is not installed: pip install 'rbtool[ray]'"


def run_script(script: str, *arguments: object, folder: Path | None = None) -> str:
    """Run a script that starts Ray to its end, and return what it printed."""
    pytest.importorskip("ray", reason=NO_RAY)
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=HANG)
    assert done.returncode == 0, done.stderr
    return done.stdout


# Ray Data -----------------------------------------------------------------------------------------

WALKS: Any = [(6, "terminated"), (1, "truncated"), (9, "truncated"), (11, "both"), (2, "terminated")] * 3


@pytest.fixture(scope="module")
def walks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("walks") / "walks"
    write_walks(path, WALKS)
    return path


def columns_of(path: Path) -> dict[str, Any]:
    """The columns of a dataset of walks."""
    with open_steps(path) as reader:
        steps = reader.manifest.steps
        rows = {field.name: reader.read(field.key, 0, steps) for field in reader.fields}
        return rows | {"step": np.concatenate([np.arange(length) for length in reader.episodes.length])}


@pytest.mark.parametrize("cuts", [[], [3], [6, 7, 8], list(range(1, 87)), [0, 20, 20, 87]])
@pytest.mark.parametrize("layout", ["ted", "packed"])
def test_blocks_that_divide_episodes_are_written_as_one_dataset(
    walks: Path, tmp_path: Path, cuts: list[int], layout: Any
) -> None:
    columns = columns_of(walks)
    edges = [0, *cuts, len(columns["step"])]
    blocks = [{name: rows[start:stop] for name, rows in columns.items()} for start, stop in pairwise(edges)]
    made = write_blocks(blocks, tmp_path / "made", layout, (), "made")
    with open_steps(walks) as reader:
        assert (made.episodes, made.boundary) == (len(WALKS), reader.manifest.boundary)
    found = columns_of(tmp_path / "made")
    assert found.keys() == columns.keys()
    assert all(np.array_equal(found[name], rows) for name, rows in columns.items())
    assert not rbtool.check(tmp_path / "made").findings


def test_invalid_blocks_are_refused(walks: Path, tmp_path: Path) -> None:
    columns = columns_of(walks)
    order = np.arange(len(columns["step"]))
    swapped = order.copy()
    swapped[[2, 3]] = swapped[[3, 2]]

    def rows(chosen: Any, **others: Any) -> dict[str, Any]:
        return {name: values[chosen] for name, values in columns.items()} | others

    refused: list[tuple[Any, str]] = [
        ([], "no rows"),
        ([{}], "expected episode"),
        ([rows(order, action=np.array(["a"] * len(order), object))], "action is object"),
        ([rows(order[:9]), rows(order[9:], action=columns["action"][9:, 0])], "action differs between rows"),
        ([rows(order[:9]), rows(order[9:], more=order[9:])], "more differs between rows: missing, then int64"),
        ([rows(swapped)], "not in their order"),
        ([rows(order), rows(order[:6])], "the steps of episode 0 do not follow each other"),
        ([rows(np.r_[order[:3], order[6:9], order[3:6]])], "the steps of episode 0 do not follow each other"),
        ([rows(order, **{"next.observation": columns["observation"][:, :2]})], "next.observation is float64"),
        ([rows(order, reward=order.astype(np.float64))], "columns reward and next.reward, expected one"),
    ]
    for number, (blocks, message) in enumerate(refused):
        with pytest.raises(SchemaError, match=message):
            write_blocks(blocks, tmp_path / f"{number}", "ted", (), "made")


@pytest.mark.parametrize("function", [rbtool.to_ray_dataset, rbtool.from_ray_dataset])
def test_ray_data_without_ray_is_an_error_with_its_installation(
    walks: Path, tmp_path: Path, function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match="not installed") as caught:
        function(walks, **({"dest": tmp_path / "made"} if function is rbtool.from_ray_dataset else {}))
    assert caught.value.hint == "pip install 'rbtool[ray]'"


# Parcels ------------------------------------------------------------------------------------------

TENSORS = {
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "a number": torch.tensor(5.0),
    "no rows": torch.zeros(0, 3),
    "bfloat16": torch.ones(4).bfloat16(),
    "conjugated": torch.complex(torch.ones(3), torch.arange(3.0)).conj(),
    "bool": torch.tensor([True, False]),
    "with gradients": torch.ones(3, requires_grad=True),
    "unsigned": torch.tensor([1, 60_000], dtype=torch.uint16),
}


def sent(value: Any) -> Any:
    buffers: list[pickle.PickleBuffer] = []
    document = pickle.dumps(Parcel(value), protocol=5, buffer_callback=buffers.append)
    return pickle.loads(document, buffers=[bytes(buffer) for buffer in buffers])


def in_parts(value: Any, count: int) -> Any:
    return joined([pickle.loads(pickle.dumps(part)) for part in split(value, count)])


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_arrive_as_they_are(name: str) -> None:
    tensor = TENSORS[name]
    for found in (sent(tensor), in_parts(tensor, 1), in_parts(tensor, 3)):
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found, tensor)
        assert not found.requires_grad
        found.zero_()  # nobody else reads this memory


def test_nests_and_tensordicts_arrive_as_they_are() -> None:
    data = TensorDict({"a": torch.arange(6), "next": {"b": torch.ones(6, 2)}, "text": NonTensorData("x", [6])}, [6])
    for found in (sent(data), in_parts(data, 2)):
        assert (found.batch_size, found["text"], found.device) == (data.batch_size, "x", data.device)
        assert (found.exclude("text") == data.exclude("text")).all()
    assert sent((True, {"index": torch.arange(3)}, [1, "x"]))[1]["index"].tolist() == [0, 1, 2]
    named = TensorDict({"a": torch.ones(2, 3)}, [2, 3], names=["time", "batch"])
    assert sent(named).names == ["time", "batch"]


def test_a_generator_continues_where_it_was() -> None:
    generator = torch.Generator().manual_seed(3)
    torch.rand(5, generator=generator)
    assert torch.equal(torch.rand(3, generator=sent(generator)), torch.rand(3, generator=generator))


# Small nests ----------------------------------------------------------------------------------------

NESTS: dict[str, Any] = {
    "tensordict": TensorDict({"a": torch.arange(6), "next": {"b": torch.rand(6, 3), "done": torch.ones(6) > 0}}, [6]),
    "device": TensorDict({"a": torch.arange(3)}, [3], device="cpu"),
    "info": (TensorDict({"a": torch.arange(3)}, [3]), {"index": (torch.arange(3),), ("x", "y"): torch.zeros(3)}),
    "element types": {str(kind): torch.arange(5).to(kind) for kind in (
        torch.bool, torch.uint8, torch.int16, torch.uint16, torch.float16, torch.bfloat16, torch.complex64,
    )},
    "lazy bits": [torch.arange(4).to(torch.complex64).conj(), torch.arange(4).to(torch.complex128).conj().imag],
    "strides": [torch.arange(6).reshape(2, 3).T, torch.arange(1.0).expand(7), torch.tensor(3.5), torch.zeros(2, 0)],
    "nothing": {"a": torch.zeros(0, 3)},
}  # fmt: skip
LARGER: dict[str, Any] = {
    "bytes": torch.zeros(1001, dtype=torch.uint8), "text": {"a": torch.zeros(3), "b": "text"}, "no tensor": [],
    "value": TensorDict({"a": torch.zeros(3), "b": NonTensorData("text", [3])}, [3]), "named": TensorDict(
        {"a": torch.zeros(3)}, [3], names=["time"]), "gradient": torch.zeros(3, requires_grad=True),
}  # fmt: skip


def flat(nest: Any) -> list[Any]:
    """The types and values of a nest."""
    if isinstance(nest, torch.Tensor):
        return [nest.dtype, tuple(nest.shape), nest.tolist()]
    if isinstance(nest, TensorDict):
        return [nest.batch_size, nest.device, {key: flat(nest[key]) for key in nest.keys()}]  # noqa: SIM118
    return [type(nest), [flat(part) for part in (nest.values() if isinstance(nest, dict) else nest)]]


@pytest.mark.parametrize("kind", NESTS)
def test_a_small_nest_arrives_as_it_was_and_can_be_written(kind: str) -> None:
    data = small(NESTS[kind], 10_000)
    assert isinstance(data, bytes)
    one, other = opened_small(data), opened_small(data)
    assert flat(one) == flat(other) == flat(NESTS[kind])
    if kind == "tensordict":
        one["a"].zero_()
        assert flat(other) == flat(NESTS[kind])


@pytest.mark.parametrize("kind", LARGER)
def test_anything_else_is_not_packed_as_a_small_nest(kind: str) -> None:
    assert small(LARGER[kind], 1_000) is None


OPTIONS = {"num_cpus": 4, "object_store_memory": 100 * 2**20, "log_to_driver": False}


def rows(first: int, count: int) -> TensorDict:
    number = torch.arange(first, first + count)
    image = (number[:, None] % 251).to(torch.uint8).expand(count, 3_000)
    return TensorDict({"number": number, "image": image, "next": {"reward": number[:, None] / 2}}, [count])


def check(batch: TensorDict) -> None:
    assert torch.equal(batch["number"], batch["index"].flatten())
    image = (batch["number"] % 251).to(torch.uint8)[:, None]
    assert bool((batch["image"] == image).all())
    assert torch.equal(batch["next", "reward"][:, 0], batch["number"] / 2)


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    ray = pytest.importorskip("ray", reason=NO_RAY)
    yield ray
    ray.shutdown()


@pytest.fixture
def buffer(ray: Any) -> Iterator[RayReplayBuffer]:
    made = remote(TensorDictReplayBuffer, batch_size=32)
    made.extend(rows(0, 100))
    yield made
    made.shutdown()


def remote(kind: type, capacity: int = 1_000, **arguments: Any) -> RayReplayBuffer:
    arguments = {"storage": partial(LazyTensorStorage, capacity)} | arguments
    return RayReplayBuffer(replay_buffer_cls=kind, ray_init_config=OPTIONS, remote_config={"num_cpus": 1}, **arguments)


def sample_on(buffer: RayReplayBuffer) -> None:
    deadline = time.monotonic() + HANG
    while time.monotonic() < deadline:
        buffer.sample()


# Without Ray ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: RayReplayBuffer(), lambda: ReplayBuffer.as_remote()])
def test_a_missing_ray_is_an_error_with_its_installation(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match="needs Ray, which is not installed") as caught:
        make()
    assert caught.value.hint == "pip install 'rbtool[ray]'"


def test_wrong_arguments_need_no_ray() -> None:
    with pytest.raises(UsageError, match="max_restarts"):
        RayReplayBuffer(remote_config={"max_restarts": -1})
    with pytest.raises(UsageError, match="transport is 'distributed'") as caught:
        RayReplayBuffer(transport="distributed")
    assert caught.value.hint.startswith("leave both out: Ray's object store passes batches")
    with pytest.raises(UsageError, match="service_backend is for other classes"):
        RayReplayBuffer(service_backend="ray")


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"service_backend": "ray", "transport": "direct"}, ValueError, "transport is 'direct'"),
        ({"service_backend": "ray", "transport_options": {"timeout": 3}}, ValueError, "transport_options .*'timeout'"),
        ({"service_backend": "ray", "service_backend_options": {"cpus": 3}}, TypeError, "argument 'cpus'"),
        ({"service_backend": "direct", "use_ray_service": True}, ValueError, "expected one of them"),
        ({"use_ray_service": "no"}, ValueError, "use_ray_service is 'no', expected True or False"),
    ],
)
def test_wrong_options_of_the_service_need_no_ray(given: dict[str, Any], kind: type, message: str) -> None:
    with pytest.raises(kind, match=message):
        TensorDictReplayBuffer(storage=LazyTensorStorage(8), **given)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_of_a_gpu_are_sent_to_the_cpu() -> None:
    data = TensorDict({"a": torch.arange(3), "text": NonTensorData("x", [3])}, [3], device="cuda")
    buffers: list[pickle.PickleBuffer] = []
    document = pickle.dumps(Parcel(data, to_cpu=True), protocol=5, buffer_callback=buffers.append)
    found = pickle.loads(document, buffers=buffers)
    assert found.device == found["a"].device == torch.device("cpu")
    assert found["a"].tolist() == [0, 1, 2]


# One Ray for all that has to pass before a change is taken -------------------------------------------

SCRIPT = """
import os, signal, sys, time
from functools import partial
import psutil, ray, torch
from tensordict import TensorDict
from rbtool import LazyTensorStorage, NetworkError, RayReplayBuffer, TensorDictReplayBuffer
folder, make = sys.argv[1], partial(
    RayReplayBuffer, replay_buffer_cls=TensorDictReplayBuffer, storage=partial(LazyTensorStorage, 100), batch_size=8,
    ray_init_config={"num_cpus": 1, "object_store_memory": 80 * 2**20, "log_to_driver": False},
)
buffer = make()
for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
    for connection in process.net_connections("inet"):
        if connection.status == psutil.CONN_LISTEN:
            assert connection.laddr.ip.removeprefix("::ffff:") == "127.0.0.1", (process.name(), connection.laddr)
buffer.extend(TensorDict({"number": torch.arange(50)}, [50]))
batch = buffer.sample()
assert torch.equal(batch["number"], batch["index"])
buffer.dumps(folder)
os.kill(buffer.call(lambda buffer: os.getpid()), signal.SIGKILL)
try:
    while True:
        buffer.sample()
except NetworkError as error:
    print(error)
buffer = make()
buffer.loads(folder)
assert buffer[:]["number"].tolist() == list(range(50)), buffer
ray.shutdown()
"""


def test_a_buffer_is_written_sampled_saved_lost_and_restored(tmp_path: Path) -> None:
    said = run_script(SCRIPT, tmp_path / "saved")
    # Ray may report the death on stdout, too, before or after this line.
    gone = "the actor with the buffer is gone, and its elements with it: "
    assert any(line.startswith(gone) for line in said.splitlines()), said


# With one Ray for this file -------------------------------------------------------------------------


@pytest.mark.slow
def test_batches_are_those_of_the_buffer(ray: Any, buffer: RayReplayBuffer) -> None:
    buffer.add(rows(100, 1)[0])
    assert (len(buffer), buffer.write_count, buffer.batch_size, buffer.stats()["capacity"]) == (101, 101, 32, 1_000)
    for size in (None, 5, 32, 300, 1_000):  # within the answer, in parts, and through the object store
        for _ in range(3):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("RL_WARNINGS", "0")
                batch = buffer.sample(size)
            assert len(batch) == (size or 32)
            check(batch)
            batch["image"].zero_()  # the memory is the batch's own
            batch["next", "reward"] += 1
    check(buffer[:])
    batch, info = buffer.sample(return_info=True)
    assert torch.equal(batch["number"], info["index"])
    assert buffer["number"].tolist() == list(range(101))


@pytest.mark.slow
def test_a_batch_is_a_view_of_the_object_store(ray: Any, buffer: RayReplayBuffer) -> None:
    buffer.extend(rows(100, 800))
    batch = buffer.sample(800)
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line.split()[0].split("-") for line in maps if "plasma" in line]
    place = batch["image"].data_ptr()
    assert any(int(start, 16) <= place < int(stop, 16) for start, stop in mapped)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_batches_as_here(ray: Any) -> None:
    here = TensorDictReplayBuffer(storage=LazyTensorStorage(100), generator=torch.Generator().manual_seed(3))
    there = remote(TensorDictReplayBuffer, 100, generator=torch.Generator().manual_seed(3))
    for buffer in (here, there):
        buffer.extend(rows(0, 60))
    for size in (8, 60):
        assert (there.sample(size) == here.sample(size)).all()
    there.shutdown()


@pytest.mark.slow
def test_iteration_ends_with_the_epoch(ray: Any) -> None:
    buffer = remote(TensorDictReplayBuffer, sampler=SamplerWithoutReplacement, batch_size=30)
    buffer.extend(rows(0, 100))
    for _ in range(2):
        found = [batch["number"] for batch in buffer]
        assert [len(part) for part in found] == [30, 30, 30, 10]
        assert torch.cat(found).sort().values.tolist() == list(range(100))
    batches = iter(buffer)
    next(batches)
    del batches
    assert buffer.call(lambda buffer: len(buffer)) == 100
    buffer.shutdown()


@pytest.mark.slow
def test_priorities_are_set_and_annealed(ray: Any) -> None:
    buffer = remote(TensorDictPrioritizedReplayBuffer, 10, alpha=1.0, beta=0.4, batch_size=64)
    buffer.extend(rows(0, 10))
    batch = buffer[:].set("index", torch.arange(10))
    buffer.update_tensordict_priority(batch.set("td_error", torch.eye(10)[7] * 1e6))
    assert buffer.sample()["number"].mode().values == 7
    buffer.update_priority(torch.arange(10), torch.eye(10)[3] * 1e6)
    batch = buffer.sample()
    assert batch["number"].mode().values == 3
    assert batch["priority_weight"].shape == (64,)
    buffer.sampler.beta = 0.9
    assert (buffer.sampler.beta, len(buffer.storage), buffer.writer.cursor) == (0.9, 10, 0)
    assert "PrioritizedSampler" in repr(buffer.sampler)
    buffer.shutdown()


@pytest.mark.slow
def test_slices_and_any_function(ray: Any) -> None:
    sampler = partial(SliceSampler, slice_len=4, traj_key="episode")
    buffer = remote(TensorDictReplayBuffer, sampler=sampler, batch_size=16)
    buffer.extend(rows(0, 50).set("episode", torch.arange(50) // 10))
    numbers = buffer.sample()["number"].view(-1, 4)
    assert bool((numbers.diff(dim=1) == 1).all())
    assert buffer.call(lambda buffer, factor: len(buffer) * factor, factor=3) == 150
    buffer.shutdown()


@pytest.mark.slow
def test_errors_are_those_of_the_buffer(ray: Any, buffer: RayReplayBuffer) -> None:
    with pytest.raises(UsageError, match="expected a tensordict, found a int") as caught:
        buffer.extend(3)
    assert caught.value.hint == "use a ReplayBuffer"
    with pytest.raises(SchemaError, match="number"):
        buffer.extend(rows(0, 3).exclude("number"))
    with pytest.raises(IndexError):
        buffer[torch.tensor([100])]
    with pytest.raises(AttributeError, match="nothing"):
        buffer.nothing()
    with pytest.raises(UsageError, match="prefetch"):
        remote(ReplayBuffer, prefetch=3)
    with pytest.raises(StopIteration):
        buffer.call(lambda buffer: next(iter([])))
    assert len(buffer) == 100


@pytest.mark.slow
def test_a_list_storage_keeps_no_memory_of_the_object_store(ray: Any) -> None:
    buffer = remote(ReplayBuffer, storage=partial(ListStorage, 1_000))
    for number in range(300):  # three times the store
        buffer.add(torch.full((1_000_000,), number % 256, dtype=torch.uint8))
    assert {len(element) for element in buffer.sample(20)} == {1_000_000}
    assert int(buffer[299][5]) == 299 % 256
    buffer.shutdown()


@pytest.mark.slow
def test_states_and_checkpoints_pass_between_here_and_there(
    ray: Any, buffer: RayReplayBuffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = TensorDictReplayBuffer(storage=LazyTensorStorage(1_000))
    here.load_state_dict(buffer.state_dict())
    check(here[:])
    here.extend(rows(100, 20))
    buffer.load_state_dict(here.state_dict())
    assert (len(buffer), buffer.write_count) == (120, 120)
    monkeypatch.chdir(tmp_path)
    buffer.dumps("saved")  # below this folder, not the actor's
    restored = TensorDictReplayBuffer(storage=LazyTensorStorage(1_000))
    restored.loads(tmp_path / "saved")
    check(restored[:])
    assert restored.write_count == 120


@pytest.mark.slow
@pytest.mark.parametrize("size", [8, 1_000])
def test_an_actor_that_dies_is_an_error_and_the_buffer_is_restored(ray: Any, size: int, tmp_path: Path) -> None:
    buffer = remote(TensorDictReplayBuffer, batch_size=size)
    buffer.extend(rows(0, 500))
    buffer.dumps(tmp_path / "saved")
    os.kill(buffer.call(lambda buffer: os.getpid()), signal.SIGKILL)
    with pytest.raises(BufferLostError, match="the actor with the buffer is gone") as caught:
        sample_on(buffer)
    assert isinstance(caught.value, ConnectionError)
    assert caught.value.hint == "make a new RayReplayBuffer, and loads() the last checkpoint"
    assert not buffer.is_alive
    with pytest.raises(NetworkError):
        buffer.extend(rows(0, 3))
    again = remote(TensorDictReplayBuffer)
    again.loads(tmp_path / "saved")
    check(again[:])
    assert again.is_alive
    again.shutdown()
    with pytest.raises(BufferLostError, match="shutdown"):
        len(again)


@pytest.mark.slow
def test_as_remote_makes_a_class_of_actors(ray: Any, buffer: RayReplayBuffer) -> None:
    actor = ReplayBuffer.as_remote({"num_cpus": 0}).remote(storage=partial(LazyTensorStorage, 10), batch_size=4)
    index = ray.get(actor.extend.remote(torch.arange(6)))
    assert index.tolist() == list(range(6))
    assert set(ray.get(actor.sample.remote()).tolist()) <= set(range(6))
    ray.kill(actor)


@pytest.mark.slow
def test_any_class_of_buffers_is_made_in_ray_by_its_service_backend(ray: Any) -> None:
    options = {"ray_init_config": OPTIONS, "remote_config": {"num_cpus": 1}}
    made: list[Any] = [
        TensorDictPrioritizedReplayBuffer(
            alpha=1.0, beta=0.4, storage=partial(LazyTensorStorage, 10), service_backend="ray",
            service_backend_options=options, transport="ray",
        )
    ]  # fmt: skip
    with pytest.warns(FutureWarning, match='write service_backend="ray"'):
        made.append(TensorDictReplayBuffer(storage=partial(LazyTensorStorage, 10), use_ray_service=True))
    for buffer, kind in zip(made, (TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer), strict=True):
        assert (type(buffer), buffer.service_backend, buffer.transport_kind) == (RayReplayBuffer, "ray", "ray")
        assert [isinstance(buffer, one) for one in (kind, ReplayBuffer, RayReplayBuffer)] == [True] * 3
        assert not isinstance(buffer, ReplayBufferEnsemble)
        assert buffer.call(lambda buffer: type(buffer).__name__) == kind.__name__
        assert buffer.extend(rows(0, 4)).tolist() == [0, 1, 2, 3]
        assert {"call", "clients", "dim_extend", "stats", "transport_kind"} <= set(dir(buffer))
        with pytest.raises(AttributeError):
            buffer.service_backend = "direct"
        buffer.shutdown()


@pytest.mark.slow
def test_the_members_of_a_buffer_are_those_in_the_actor(ray: Any) -> None:
    writer = partial(TensorDictRoundRobinWriter, track_generations=True)
    buffer = remote(TensorDictReplayBuffer, 10, writer=writer, sampler=SamplerWithoutReplacement, batch_size=5)
    assert (buffer.dim_extend, buffer.batch_size, buffer.write_count) == (0, 5, 0)
    buffer.extend(rows(0, 10).set("episode", torch.arange(10) // 5))
    assert buffer.stats()["utilization"] == 1.0
    batch = buffer.next()
    patch = {"number": torch.full((5,), 7)}
    result = buffer.update_if_present(index=batch["index"], generation=batch["index_generation"], patch=patch)
    assert result.updated.all()
    submitted = buffer.submit_update_if_present(index=batch["index"], generation=batch["index_generation"], patch=patch)
    assert submitted.result().updated.all()
    buffer.synchronize()
    assert buffer.read_all_in_order(3).shape == (3,)
    assert sorted(buffer["number"].tolist()).count(7) >= 5
    buffer.write_all(rows(50, 2).set("episode", torch.zeros(2, dtype=torch.int64)))
    assert buffer[:2]["number"].tolist() == [50, 51]
    assert [int(one["number"][-1] >= 0) for one in buffer.query(lambda one: one.length == 5)] == [1, 1]
    buffer.mark_update(torch.arange(2))
    assert isinstance(buffer.set_sampler(RandomSampler()), SamplerWithoutReplacement)
    buffer.set_rng(torch.Generator().manual_seed(3))
    state = buffer.state_dict()
    first = buffer.sample()["index"]
    buffer.load_state_dict(state)
    assert torch.equal(buffer.sample()["index"], first)
    assert buffer.append_transform(lambda batch: batch.set("twice", 2 * batch["number"])) is buffer
    batch = buffer.sample()
    assert torch.equal(batch["twice"], 2 * batch["number"])
    buffer.empty()
    assert (len(buffer), buffer.write_count) == (0, 0)
    buffer.dim_extend = 0
    with pytest.raises(UsageError, match="dim_extend is 3"):
        buffer.dim_extend = 3
    buffer.close()


@pytest.mark.slow
def test_a_loader_yields_the_batches_of_the_actor(ray: Any, buffer: RayReplayBuffer) -> None:
    for batch in islice(DataLoader(buffer, batch_size=None), 3):  # type: ignore[arg-type]
        check(batch)
    with pytest.raises(SchemaError, match="cannot make batches of the batches"):
        next(iter(DataLoader(buffer, batch_size=4)))  # type: ignore[arg-type]


@pytest.mark.slow
def test_clients_are_small_and_leave_the_actor_to_its_owner(ray: Any) -> None:
    buffer = remote(TensorDictReplayBuffer, 100, batch_size=8)
    document = ray.cloudpickle.dumps(buffer.client())
    assert len(document) < 2_000
    client = pickle.loads(document)
    client.extend(rows(0, 20))
    assert (len(client), len(buffer), client.write_count, client.batch_size) == (20, 20, 20, 8)
    check(client.sample())
    assert isinstance(client, TensorDictReplayBuffer)
    client.empty()
    assert [len(one) for one in buffer.clients(2)] == [0, 0]
    for name in ("start", "client", "clients", "close", "shutdown"):
        with pytest.raises(AttributeError, match=name):
            getattr(client, name)
    for count, kind in ((True, TypeError), (2.0, TypeError), (0, ValueError)):
        with pytest.raises(kind, match="the number of clients is"):
            buffer.clients(count)  # type: ignore[arg-type]
    assert buffer.start() is buffer
    buffer.close()
    buffer.shutdown(timeout=1.0)
    for call in (buffer.start, buffer.client, buffer.sample, lambda: buffer.clients(1), client.sample):
        with pytest.raises(RuntimeError, match="the actor with the buffer is gone"):
            call()
    assert not buffer.is_alive
    assert not client.is_alive


CLUSTER = """
from functools import partial
import ray, sys, torch
from ray.cluster_utils import Cluster
from tensordict import TensorDict
from rbtool import LazyTensorStorage, RayReplayBuffer, TensorDictReplayBuffer
from rbtool.core.engine.ray_cluster import alone
quiet = {"num_cpus": 2, "object_store_memory": 80 * 2**20}
with alone(ray):
    cluster = Cluster(initialize_head=True, head_node_args=quiet | {"include_dashboard": False})
    cluster.add_node(**quiet, resources={"second": 2})
    ray.init(address=cluster.address, log_to_driver=False)
try:
    buffer = RayReplayBuffer(
        replay_buffer_cls=TensorDictReplayBuffer, storage=partial(LazyTensorStorage, 10_000), batch_size=500,
        remote_config={"resources": {"second": 1}},
    )
    @ray.remote(num_cpus=1, scheduling_strategy="SPREAD")
    def collect(buffer, first):
        for start in range(first, first + 1_000, 100):
            number = torch.arange(start, start + 100)
            buffer.extend(TensorDict({"number": number, "twice": 2 * number[:, None].expand(100, 300)}, [100]))
        return ray.get_runtime_context().get_node_id()
    nodes = ray.get([collect.remote(buffer, 1_000 * worker) for worker in range(4)])
    assert buffer[:]["number"].sort().values.tolist() == list(range(4_000))
    batch = buffer.sample()
    assert bool((batch["twice"] == 2 * batch["number"][:, None]).all())
    print(len(set(nodes)))
finally:
    ray.shutdown()
    cluster.shutdown()
"""


@pytest.mark.slow
def test_tasks_on_two_nodes_write_to_one_buffer() -> None:
    assert run_script(CLUSTER).splitlines()[-1] == "2"


@pytest.mark.slow
def test_after_a_shutdown_of_ray_no_other_one_is_started(ray: Any) -> None:
    buffer = remote(ReplayBuffer)
    assert pickle.loads(ray.cloudpickle.dumps(buffer)).is_alive
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    ray.shutdown()
    with pytest.raises(BufferLostError, match="Ray was shut down"):
        len(buffer)
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("guide", "name", "made"),
    [("sharing", "RayReplayBuffer", "checkpoint/storage"), ("scale", "to_ray_dataset", "scaled")],
)
def test_the_examples_of_the_documentation_run(guide: str, name: str, made: str, tmp_path: Path) -> None:
    write_walks(tmp_path / "walks", WALKS)
    page = (ROOT / f"docs/guides/{guide}.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (example,) = (found for found in examples if name in found)
    run_script(example, folder=tmp_path)
    assert (tmp_path / made).is_dir()


ROUND_TRIP = """
import sys
import numpy as np, ray, rbtool
from pathlib import Path
walks, folder = map(Path, sys.argv[1:])
rows = rbtool.to_ray_dataset(walks, block_bytes=700)
blocks = [block["episode"].tolist() for block in rows.iter_batches(batch_size=None, batch_format="numpy")]
assert len(blocks) > 3 and sum(blocks, []) == sorted(sum(blocks, []))
assert all(one[-1] < other[0] for one, other in zip(blocks, blocks[1:]))
made = rbtool.from_ray_dataset(rows.map_batches(lambda block: block | {"action": -block["action"]}), folder / "made")
some = rbtool.to_ray_dataset(walks, fields=["action"]).schema().names
assert set(some) == {"action", "episode", "step", "next.done", "next.terminated", "next.truncated"}, some
try:
    rbtool.from_ray_dataset(rows.random_shuffle(seed=0), folder / "shuffled")
except rbtool.SchemaError as error:
    print(error.message)
assert not list(folder.glob("*shuffled*")), "a failure leaves something behind"
print("done")
"""


@pytest.mark.slow
def test_a_dataset_comes_back_from_ray_data_in_its_order(walks: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray.data", reason="Ray Data is not installed: pip install 'rbtool[ray]'")
    said = run_script(ROUND_TRIP, walks, tmp_path)
    assert "follow each other" in said or "not in their order" in said
    before, after = columns_of(walks), columns_of(tmp_path / "made")
    assert np.array_equal(after.pop("action"), -before.pop("action"))
    assert before.keys() == after.keys()
    assert all(np.array_equal(after[name], rows) for name, rows in before.items())
