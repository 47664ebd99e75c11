"""Beside TorchRL: folders of prioritised buffers, from here to there and back.

Its own prioritised sampler needs compiled trees, which are not in every build: what needs them skips without.
"""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import rbtool
from rbtool.core.buffers.prioritized import PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("default")]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    data = pytest.importorskip("torchrl.data")

EXPONENTS: dict[str, Any] = {"alpha": 0.7, "beta": 0.5, "eps": 1e-6}
LATER = {"service_backend", "service_backend_options", "transport", "transport_options"}


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
        if name == "self" or name in LATER or parameter.kind is parameter.VAR_KEYWORD:
            continue
        value = {"alpha": 0.5, "beta": 0.5, "batch_size": 4}.get(name, parameter.default)
        assert kind(**{"alpha": 0.7, "beta": 0.4} | {name: value}) is not None
        mine = inspect.signature(kind.__init__).parameters
        if name in mine:
            assert mine[name].default == parameter.default
