"""Loaders with real workers: start methods, ranks of gloo, workers that die, Ctrl-C; and batches on a device."""

from __future__ import annotations

import multiprocessing
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from processes import run_forked
from streams import BATCH, SAMPLERS, contents, epochs, opened, rows
from tensordict import TensorDict
from torch.utils.data import DataLoader
from waiting import HANG, wait_until

import rbtool
from rbtool.core.testing.datasets import write_mixture, write_packed

Walks = Callable[[str], Path]
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def loader(dataset: Any, workers: int, **options: Any) -> Any:
    return DataLoader(dataset, batch_size=None, num_workers=workers, **options)


@pytest.mark.parametrize(
    "sampler",
    [
        name if name in ("without replacement", "slices") else pytest.param(name, marks=pytest.mark.slow)
        for name in SAMPLERS
    ],
)
def test_batches_are_the_same_for_any_number_of_workers(walks: Walks, sampler: str) -> None:
    expected = epochs(walks("ragged"), 2, sampler)
    assert contents(loader(opened(walks("ragged"), sampler), 0)) == expected[0]
    made = loader(opened(walks("ragged"), sampler), 2)
    assert [contents(made) for _ in range(2)] == expected
    assert contents(loader(opened(walks("ragged"), sampler), 4)) == expected[0]
    by_number = opened(walks("ragged"), sampler, style="map")
    assert contents(loader(by_number, 2)) == expected[0]
    assert contents(rbtool.TorchLoader(by_number, num_workers=2)) == expected[0]


@pytest.mark.parametrize("layout", ["ted", "packed"])
@pytest.mark.parametrize("method", [pytest.param(name, marks=pytest.mark.slow) for name in ("spawn", "forkserver")])
def test_batches_are_the_same_for_any_start_method(walks: Walks, tmp_path: Path, method: str, layout: Any) -> None:
    stored = walks("ragged")
    if layout == "packed":
        write_packed(stored, tmp_path / layout)
    else:
        shutil.copytree(stored, tmp_path / layout)
    expected = epochs(tmp_path / layout, 3, "slices")
    made = loader(opened(tmp_path / layout, "slices"), 2, multiprocessing_context=method)
    assert [contents(made) for _ in range(3)] == expected
    options: Any = {"multiprocessing_context": method, "persistent_workers": True}
    kept = rbtool.TorchLoader(opened(tmp_path / layout, "slices"), num_workers=2, **options)
    assert [contents(kept) for _ in range(2)] == expected[:2]


@pytest.mark.parametrize("style", ["iterable", "map"])
def test_persistent_workers_follow_the_epoch(walks: Walks, style: str) -> None:
    expected = epochs(walks("ragged"), 5)
    dataset = opened(walks("ragged"), style=style)
    made = loader(dataset, 2, persistent_workers=True)
    for epoch in (0, 1, 4, 2):
        dataset.set_epoch(epoch)
        assert contents(made) == expected[epoch]
    if style == "iterable":
        assert contents(made) == expected[3]
        dataset.load_state_dict(opened(walks("ragged")).state_dict() | {"epoch": 1, "batch": 2})
        assert contents(made) == expected[1][2:]


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}], ids=["new", "persistent"])
def test_the_next_epoch_follows_an_abandoned_pass(walks: Walks, options: dict[str, Any]) -> None:
    expected = epochs(walks("ragged"), 3)
    ours = rbtool.TorchLoader(opened(walks("ragged")), num_workers=2, **options)
    for made in (loader(opened(walks("ragged")), 2, **options), ours):
        assert contents([next(iter(made))]) == expected[0][:1]
        assert [contents(made) for _ in range(2)] == expected[1:]


def test_workers_send_batches_of_every_kind() -> None:
    odd = TensorDict(
        {
            "a": torch.arange(12), "nothing": torch.zeros(12, 0), "flag": torch.arange(12) % 2 == 0,
            "half": torch.arange(12).bfloat16(), "wave": torch.arange(12).to(torch.complex64),
            "next": {"deep": {"b": torch.arange(24, dtype=torch.int16).reshape(12, 2)}},
        },
        [12],
    )  # fmt: skip
    for storage in (rbtool.TensorStorage(odd), rbtool.TensorStorage(torch.arange(12)), rbtool.ListStorage(12)):
        if isinstance(storage, rbtool.ListStorage):
            storage.set(range(12), [torch.full((3,), number) for number in range(12)])
        buffer = rbtool.ReplayBuffer(storage=storage, sampler=rbtool.SamplerWithoutReplacement(), batch_size=5)
        alone = list(rbtool.torch_dataset(buffer, seed=2))
        for batch, other in zip(alone, loader(rbtool.torch_dataset(buffer, seed=2), 2), strict=True):
            assert type(batch) is type(other)
            assert bool((batch == other).all())
            if isinstance(batch, TensorDict):
                kinds = [{key: value.dtype for key, value in one.items(True, True)} for one in (batch, other)]
                assert kinds[0] == kinds[1]
                other["a"] += 1  # leaves are apart
                assert (other["flag"] == batch["flag"]).all()


# Ranks ----------------------------------------------------------------------------------------------


def of_rank(path: Path, rank: int, ranks: int, meeting: Path, queue: Any) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    dataset = rbtool.torch_dataset(path, BATCH, seed=5)
    found = rows(loader(dataset, 2))
    together = torch.tensor([len(found)])
    torch.distributed.all_reduce(together)
    queue.put((found, int(together)))
    torch.distributed.destroy_process_group()


def test_ranks_of_a_process_group_divide_an_epoch(walks: Walks, tmp_path: Path) -> None:
    context, ranks = multiprocessing.get_context("fork"), 2
    queue = context.Queue()
    arguments = [(walks("ragged"), rank, ranks, tmp_path / "meeting", queue) for rank in range(ranks)]
    processes = [context.Process(target=of_rank, args=one) for one in arguments]
    for process in processes:
        process.start()
    answers = [queue.get(timeout=HANG) for _ in range(ranks)]
    for process in processes:
        process.join(HANG)
    assert sorted(row for found, _ in answers for batch in found for row in batch) == list(range(33))
    assert {together for _, together in answers} == {2 * len(answers[0][0])}


# Ends -----------------------------------------------------------------------------------------------

ENDED = """
import multiprocessing, os, signal, sys
import rbtool
os.setsid()
dataset = rbtool.torch_dataset(sys.argv[1], 4, sampler=rbtool.RandomSampler(), seed=1)

def loop():
    for number, batch in enumerate(rbtool.TorchLoader(dataset, num_workers=2)):
        if number == 5:
            workers = [child.pid for child in multiprocessing.active_children()]
            print(*workers, flush=True)
            os.killpg(0, signal.SIGINT) if sys.argv[2] == "ctrl-c" else os.kill(workers[0], signal.SIGKILL)

try:
    try:
        loop()
    except RuntimeError as error:
        found = str(error)
except RuntimeError as error:  # of torch's signal handler, at any moment
    found = str(error)
print(found)
"""


def wait_for_the_end(workers: str) -> None:
    """Wait until processes, whose numbers these are, have ended."""
    pids = [int(pid) for pid in workers.split()]
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), "the end of the workers")


def test_a_dead_worker_and_ctrl_c_end_the_loop_and_all_workers(walks: Walks) -> None:
    done = run_forked(ENDED, walks("ragged"), "kill")
    workers, error = done.stdout.splitlines()[:2]
    assert "worker" in error
    wait_for_the_end(workers)
    done = run_forked(ENDED, walks("ragged"), "ctrl-c")
    assert done.returncode == -signal.SIGINT
    wait_for_the_end(done.stdout)


@pytest.mark.slow
def test_an_error_in_a_worker_keeps_its_type_and_message(walks: Walks) -> None:
    def broken(batch: Any) -> Any:
        raise ValueError("no such thing")

    with pytest.raises(ValueError, match="no such thing"):
        list(loader(opened(walks("ragged"), transform=broken), 2))


def with_an_error(batch: Any) -> Any:
    raise rbtool.UsageError("no such thing", hint="take another")


@pytest.mark.parametrize("make", [loader, lambda dataset, workers: rbtool.TorchLoader(dataset, num_workers=workers)])
def test_an_error_of_rbtool_in_a_worker_has_its_own_message_and_hint(walks: Walks, make: Any) -> None:
    with pytest.raises(rbtool.UsageError) as caught:
        list(make(opened(walks("ragged"), transform=with_an_error), 1))
    error = caught.value
    assert (str(error), error.hint) == ("no such thing", "take another")
    where, hint = error.__notes__
    assert where.startswith("raised in DataLoader worker process 0:\nTraceback (most recent call last):\n")
    assert where.endswith("UsageError: no such thing")
    assert "in with_an_error" in where
    assert hint == "hint: take another"


# What is refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shuffle": True}, "shuffle"), ({"batch_size": 4}, "batch_size"), ({"prefetch": -1}, "prefetch is -1"),
        ({"in_order": False}, "in_order"),
    ],
)  # fmt: skip
def test_arguments_that_the_dataset_decides_are_refused(walks: Walks, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rbtool.TorchLoader(opened(walks("ragged")), **options)
    with pytest.raises(ValueError, match="expected a torch dataset"):
        rbtool.TorchLoader(rbtool.load_dataset(walks("ragged"), BATCH))  # type: ignore[arg-type]


def test_persistent_workers_with_a_copy_of_a_ring_are_refused() -> None:
    buffer = rbtool.ReplayBuffer(
        storage=rbtool.LazyTensorStorage(20), sampler=rbtool.SamplerWithoutReplacement(), batch_size=4
    )
    buffer.extend(torch.arange(20))
    options: Any = {"num_workers": 1, "persistent_workers": True}
    with pytest.raises(ValueError, match="copy of rows") as caught:
        rbtool.TorchLoader(rbtool.torch_dataset(buffer, seed=1), **options)
    assert "share" in caught.value.hint  # type: ignore[attr-defined]
    made = loader(rbtool.torch_dataset(buffer, seed=1), workers=1, persistent_workers=True)
    list(made)
    with pytest.raises(RuntimeError, match="copy of rows"):
        list(made)
    buffer.share()
    kept = rbtool.TorchLoader(rbtool.torch_dataset(buffer, seed=1), **options)
    for number in (0, 100):
        assert sorted(element for batch in kept for element in batch.tolist())[-1] == number + 19
        buffer.extend(torch.arange(100, 120))


def test_a_buffer_in_a_loader_names_the_right_call(walks: Walks) -> None:
    buffer = rbtool.load_dataset(walks("ragged"), BATCH, sampler=rbtool.SamplerWithoutReplacement(), seed=0)
    with pytest.raises(RuntimeError, match="whole epoch") as caught:
        len(loader(buffer, 2))
    assert "DataLoader(rbtool.torch_dataset(buffer), batch_size=None, num_workers=2)" in caught.value.hint  # type: ignore[attr-defined]


# Batches arrive on the device, the same as without one, of mixtures too.

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=on_cuda)]


@pytest.mark.parametrize("ahead", [0, 1, 3, 100])
@pytest.mark.parametrize("sampler", ["without replacement", "slices"])
@pytest.mark.parametrize("device", DEVICES)
def test_batches_on_a_device_are_those_of_the_dataset(walks: Walks, device: str, sampler: str, ahead: int) -> None:
    expected = contents(opened(walks("ragged"), sampler))
    loader = rbtool.TorchLoader(opened(walks("ragged"), sampler), device=device, prefetch=ahead)
    batches = list(loader)
    assert {batch.device.type for batch in batches} == {device}
    assert all(value.device.type == device for batch in batches for value in batch.values(True, True))
    assert contents(batches) == expected


@pytest.mark.parametrize("device", DEVICES)
def test_batches_made_ahead_are_not_part_of_the_state(walks: Walks, device: str) -> None:
    loader = rbtool.TorchLoader(opened(walks("ragged")), device=device, prefetch=4)
    batches = iter(loader)
    first = [next(batches), next(batches)]
    again = rbtool.TorchLoader(opened(walks("ragged"), seed=99))
    again.load_state_dict(loader.state_dict())
    assert rows([*first, *again]) == rows(opened(walks("ragged")))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_refused_before_the_first_batch(walks: Walks) -> None:
    with pytest.raises(ValueError, match="which PyTorch does not find"):
        rbtool.TorchLoader(opened(walks("ragged")), device="cuda")


def test_workers_cannot_read_rows_on_the_gpu(walks: Walks) -> None:
    dataset = opened(walks("ragged"))
    dataset.buffer.storage.device = torch.device("cuda:0")
    with pytest.raises(ValueError, match="rows are on cuda:0"):
        rbtool.TorchLoader(dataset, num_workers=1)
    rbtool.TorchLoader(dataset)


@on_cuda
@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("options", [{}, {"pin_memory": True}])
def test_rows_on_the_gpu_arrive_as_they_are(ahead: int, options: dict[str, bool]) -> None:
    found = []
    for device in ("cuda", "cpu"):
        storage = rbtool.LazyTensorStorage(40, device=device)
        buffer = rbtool.ReplayBuffer(storage=storage, sampler=rbtool.SamplerWithoutReplacement())
        buffer.extend(TensorDict({"a": torch.arange(40)}, [40]))
        loader = rbtool.TorchLoader(rbtool.torch_dataset(buffer, 8, seed=0), device="cuda", prefetch=ahead, **options)
        found.append([batch["a"] for batch in loader])
    assert all(batch.is_cuda for batches in found for batch in batches)
    assert torch.equal(torch.cat(found[0]), torch.cat(found[1]))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_mixture_file_is_loaded(walks: Walks, tmp_path: Path, workers: int) -> None:
    write_mixture(tmp_path / "m.toml", walks("ragged"), walks("truncated"))
    made = [rbtool.torch_dataset(tmp_path / "m.toml", 8, sampler=None, seed=1, batches=20) for _ in range(2)]
    found = [list(rbtool.TorchLoader(one, num_workers=workers)) for one in made]
    assert contents(found[0]) == contents(found[1])
    sources = torch.cat([batch["source_id"].flatten() for batch in found[0]])
    assert sources.shape == (160,)
    assert 50 <= int((sources == 0).sum()) <= 110
