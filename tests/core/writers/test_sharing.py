"""Writers in more than one process; the storage is written under no lock, one process at a time."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import BaseContext

import pytest
import torch
from tensordict import TensorDict
from waiting import HANG

from rbtool.core.errors import SchemaError
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage
from rbtool.core.writers.base import Writer
from rbtool.core.writers.max_value import TensorDictMaxValueWriter
from rbtool.core.writers.round_robin import RoundRobinWriter, TensorDictRoundRobinWriter

FORK, SPAWN = (multiprocessing.get_context(method) for method in ("fork", "spawn"))


def rows(value: int, count: int = 3) -> TensorDict:
    return TensorDict({"x": torch.full((count,), float(value))}, [count])


def extend_once(writer: Writer, value: int) -> None:
    writer.extend(rows(value))


def extended_elsewhere(context: BaseContext, writer: Writer, value: int) -> int | None:
    process = context.Process(target=extend_once, args=(writer, value))
    process.start()
    process.join(HANG)
    return process.exitcode


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize(
    ("context", "kind"),
    [
        pytest.param(FORK, RoundRobinWriter, id="fork-plain"),
        pytest.param(FORK, TensorDictRoundRobinWriter, id="fork-tensordict"),
        pytest.param(SPAWN, RoundRobinWriter, id="spawn-plain", marks=pytest.mark.slow),
        pytest.param(SPAWN, TensorDictRoundRobinWriter, id="spawn-tensordict", marks=pytest.mark.slow),
    ],
)
def test_a_child_goes_on_in_the_same_ring(context: BaseContext, kind: type[RoundRobinWriter]) -> None:
    storage, writer = LazyMemmapStorage(8), kind(track_generations=True)
    writer.register_storage(storage)
    writer.extend(rows(1))
    assert extended_elsewhere(context, writer, 2) == 0
    assert (writer._cursor, writer._write_count, len(storage)) == (6, 6, 6)
    writer.extend(rows(3))
    assert storage[:]["x"].tolist() == [3, 1, 1, 2, 2, 2, 3, 3]
    assert writer.generations_of(torch.arange(8)).tolist() == [1, 0, 0, 0, 0, 0, 0, 0]


def max_value() -> TensorDictMaxValueWriter:
    writer = TensorDictMaxValueWriter(rank_key="x")
    writer.register_storage(LazyMemmapStorage(8))
    writer.extend(rows(1))
    return writer


def test_a_ranking_cannot_be_passed_to_a_spawned_process() -> None:
    process = multiprocessing.get_context("spawn").Process(target=extend_once, args=(max_value(), 2))
    with pytest.raises(RuntimeError, match="cannot be shared between processes"):
        process.start()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_a_ranking_refuses_to_write_in_a_forked_process() -> None:
    writer = max_value()

    def attempt(answers: multiprocessing.Queue) -> None:
        try:
            writer.extend(rows(2))
        except SchemaError as error:
            answers.put(str(error))
        else:
            answers.put("written")

    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    process = context.Process(target=attempt, args=(answers,))
    process.start()
    assert "cannot be shared between processes" in answers.get(timeout=HANG)
    process.join(HANG)
    assert writer._write_count == 3
