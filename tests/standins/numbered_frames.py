"""Steps with numbers for frames, stacks of them, and a plain walk back from every row to compare with."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.samplers.base import Sampler
from rbtool.core.testing.slice_samplers import Coordinates, RingModel, Twin
from rbtool.core.transforms.windows import StoredFrameStack
from rbtool.core.writers.base import ImmutableDatasetWriter

PAD = -7


def after(number: int) -> int:
    """The next frame of a step, which is that of no other step."""
    return -number - 100


def stack(n: int = 3, **options: Any) -> StoredFrameStack:
    return StoredFrameStack(n, "number", dim=-1, padding_value=PAD, **options)


def with_next(twin: Twin) -> Twin:
    """Store a next frame with every step."""
    storage = twin.buffer.storage
    if len(storage):
        storage.add_entries({("next", "number"): -storage[:]["number"] - 100})
    return twin


def earlier(model: RingModel, place: Coordinates) -> list[int]:
    """Walk back from a step as long as the one before is of its episode and in the ring; the oldest number first."""
    slot, *lanes = place
    lane, found = (lanes or [0])[0], [model.step_at(place).number]
    while len(found) <= model.capacity:
        slot = (slot - 1) % model.capacity
        if not (model.follows(slot, lane, "ids") and model.follows(slot, lane, "done")):
            break
        found.append(model.step_at((slot, *lanes)).number)
    return found[::-1]


def expected(model: RingModel, place: Coordinates, n: int, padding: str) -> tuple[list[int], list[int]]:
    """The stack of a step, and that of its next frame."""
    known = earlier(model, place)
    padded = [known[0] if padding == "same" else PAD] * n + known
    # A frame that is known fills up no place before the first one.
    if padding == "same":
        padded = [known[max(0, len(known) - n)]] * n + known[max(0, len(known) - n) :]
    root = padded[-n:]
    return root, [*root[1:], after(known[-1])]


def require_stacks(batch: Any, model: RingModel, n: int, padding: str = "constant") -> None:
    """Compare every step of a batch, by its index, with the walk back."""
    places = batch["index"].reshape(-1, model.ndim).tolist()
    roots, nexts = (batch[key].reshape(-1, n).tolist() for key in ("number", ("next", "number")))
    assert len(places) == len(roots)
    for place, root, following in zip(places, roots, nexts, strict=True):
        assert (root, following) == expected(model, tuple(place), n, padding), place


def drawing(twin: Twin, sampler: Sampler, n: int = 3, batch_size: int = 8, **options: Any) -> TensorDictReplayBuffer:
    """A buffer over the rows of a twin that stacks; its writer leaves the ring where it is."""
    return TensorDictReplayBuffer(
        storage=twin.buffer.storage, sampler=sampler, transform=stack(n, **options), batch_size=batch_size,
        writer=ImmutableDatasetWriter(),
    )  # fmt: skip


def flagged(rows: int = 9, ends: tuple[int, ...] = (3, 4), **more: Any) -> TensorDict:
    """Steps with numbers, whose flags alone separate them."""
    done = torch.zeros(rows, 1, dtype=torch.bool)
    done[list(ends)] = True
    number = torch.arange(rows)
    return TensorDict({"number": number, **more, "next": {"number": number + 100, "done": done}}, [rows])
