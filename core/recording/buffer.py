"""The episode that an environment is in, gathered in memory until it ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import SchemaError, UsageError
from ..format.contracts import Array
from ..ted.schema import NEXT_DONE, NEXT_REWARD, NEXT_TERMINATED, NEXT_TRUNCATED, Key
from .infos import InfoRows
from .layout import RawEpisode, RowLeaf
from .spaces import Encoder, RecordedLeaf, stack_padded

PIXELS = "pixels"
NO_FRAME = "render() gave a frame for some steps and None for others, or for all, expected one for each step"
_ROOM = 64


class _Rows:
    """The rows of one leaf; the room is kept from one episode to the next."""

    def __init__(self, leaf: RecordedLeaf) -> None:
        self.leaf = leaf
        self._array = np.empty((_ROOM, *leaf.shape), leaf.dtype) if not leaf.ragged else None
        self._held: list[Array] = []

    def put(self, row: int, value: Any) -> None:
        """Copy a value to a row, in which nothing or an unfinished step is."""
        array = self._array
        if array is None:
            del self._held[row:]
            self._held.append(np.array(value))
            return
        if row == len(array):
            self._array = array = np.concatenate([array, np.empty_like(array)])
        array[row] = value

    def take(self, count: int) -> Array:
        """Return the first rows, `[count, *shape]`; valid until the next one is put."""
        if self._array is not None:
            return self._array[:count]
        return stack_padded(self._held[:count], self.leaf)


class EpisodeBuffer:
    """Gathers the steps of one episode after the other; `number` and `seed` are those of the episode under way.

    A step comes in two parts: `act` before the environment is stepped, which checks the action, then `observe`. An
    error in either leaves the steps before it, and nothing is taken until `begin`: there would be a gap.
    """

    def __init__(self, observation: Encoder, action: Encoder, *, infos: bool = True) -> None:
        self.is_open = False
        self.length = 0
        self.seed: int | None = None
        self._observation, self._action = observation, action
        self._states = [_Rows(leaf) for leaf in observation.leaves]
        self._steps = [_Rows(leaf) for leaf in action.leaves]
        self._pixels: _Rows | None = None
        self._rewards: list[float] = []
        self._terminated: list[bool] = []
        self._truncated: list[bool] = []
        self._infos = InfoRows() if infos else None

    @property
    def dropped(self) -> Mapping[str, str]:
        """Names of the infos that cannot be kept, and the reasons."""
        return self._infos.dropped if self._infos is not None else {}

    @property
    def renamed(self) -> Mapping[str, str]:
        """Names of infos that are stored by another name, and that name."""
        return self._infos.renamed if self._infos is not None else {}

    @property
    def leaves(self) -> tuple[RowLeaf, ...]:
        """What the rows have."""
        states = [*self._states, *([self._pixels] if self._pixels is not None else [])]
        return (*(RowLeaf(one.leaf, True) for one in states), *(RowLeaf(one.leaf, False) for one in self._steps))

    def begin(self, observation: Any, info: Mapping[Any, Any], *, seed: int | None = None, frame: Any = None) -> None:
        """Begin an episode with what `reset` returned; what was there of another one is gone."""
        self.discard()
        self._put_state(0, observation, info, frame)
        self.seed, self.is_open = seed, True

    def act(self, action: Any) -> None:
        """Check and keep the action of the next step. UsageError where no episode is under way."""
        if not self.is_open:
            raise UsageError("step() comes after the end of an episode: call reset() first")
        values = self._action.encode(action)
        for rows, value in zip(self._steps, values, strict=True):
            rows.put(self.length, value)

    def observe(
        self,
        observation: Any,
        reward: Any,
        terminated: Any,
        truncated: Any,
        info: Mapping[Any, Any],
        frame: Any = None,
    ) -> bool:
        """Keep what the step returned; return whether the episode ended."""
        self.is_open = False  # until all of it is kept
        if type(reward) is not float:
            reward = _reward(reward)
        ended = (bool(terminated), bool(truncated))
        self._put_state(self.length + 1, observation, info, frame)
        self._rewards.append(reward)
        self._terminated.append(ended[0])
        self._truncated.append(ended[1])
        self.length += 1
        self.is_open = not (ended[0] or ended[1])
        return not self.is_open

    def _put_state(self, row: int, observation: Any, info: Mapping[Any, Any], frame: Any) -> None:
        values = self._observation.encode(observation)
        for rows, value in zip(self._states, values, strict=True):
            rows.put(row, value)
        if frame is not None:
            self._put_frame(row, frame)
        elif self._pixels is not None:
            raise SchemaError(NO_FRAME)
        if info and self._infos is not None:
            self._infos.put(row, info)

    def _put_frame(self, row: int, frame: Any) -> None:
        found = np.asarray(frame)
        if self._pixels is None:
            if row:
                raise SchemaError(NO_FRAME)
            if found.dtype != np.uint8 or found.ndim != 3:
                raise SchemaError(f"render() gave {found.dtype} {list(found.shape)}, expected uint8 [height, width, 3]")
            self._pixels = _Rows(RecordedLeaf((PIXELS,), "uint8", found.shape, "observation"))
        expected = self._pixels.leaf.shape
        if found.dtype != np.uint8 or found.shape != expected:
            raise SchemaError(
                f"render() gave {found.dtype} {list(found.shape)}, the frames before it are uint8 {list(expected)}"
            )
        self._pixels.put(row, found)

    def take(self) -> RawEpisode:
        """Return the episode, and be without one: its arrays are valid until `begin`. It needs a step at least.

        One that did not end is cut off: its last step becomes truncated.
        """
        length = self.length
        terminated, truncated = (
            np.array(flags[:length], bool)[:, None] for flags in (self._terminated, self._truncated)
        )
        cut_off = not (terminated[-1, 0] or truncated[-1, 0])
        truncated[-1] |= cut_off
        states = {row.leaf.key: row.take(length + 1) for row in self._states}
        if self._pixels is not None:
            states[PIXELS,] = self._pixels.take(length + 1)
        steps: dict[Key, Array] = {row.leaf.key: row.take(length) for row in self._steps}
        steps[NEXT_REWARD] = np.array(self._rewards[:length], np.float64)[:, None]
        steps |= {NEXT_DONE: terminated | truncated, NEXT_TERMINATED: terminated, NEXT_TRUNCATED: truncated}
        infos = self._infos.take(length) if self._infos is not None else {}
        raw = RawEpisode(length, self.leaves, states, steps, infos, self.seed, bool(cut_off))
        self.discard()
        return raw

    def discard(self) -> None:
        """Be without an episode."""
        self.is_open, self.length, self.seed = False, 0, None
        self._rewards, self._terminated, self._truncated = [], [], []
        if self._infos is not None:
            self._infos.clear()


def _reward(reward: Any) -> float:
    try:
        found = np.asarray(reward)
        if found.size == 1 and found.dtype.kind in "biuf":
            number = found.item()
            kept = float(number)
            if kept == number or number != number:
                return kept
            raise SchemaError(f"the reward {number} ({found.dtype}) is no float64, which rewards are stored as")
    except (TypeError, ValueError, OverflowError):
        pass
    shape = f" {list(reward.shape)}" if isinstance(reward, np.ndarray) else ""
    raise SchemaError(f"the reward is a {type(reward).__name__}{shape}, expected one number")
