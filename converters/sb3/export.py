"""Exports to the pickle of a `ReplayBuffer` of Stable-Baselines3: `model.load_replay_buffer(DEST)`.

It is written opcode by opcode, so that rows are never all in memory, and neither Stable-Baselines3 nor torch is needed.
If there are several arrays of observations, the buffer is a `DictReplayBuffer`. The buffer has one row more than there
are steps, so that it is not full: the beginning of a full buffer's first episode may have been overwritten.

A dataset that was made of a buffer with several environments is exported with as many environments, if all of them have
the same number of steps; any other dataset becomes the buffer of one environment, episode after episode. The algorithms
of Stable-Baselines3 store actions of a Box scaled from its bounds to -1 and 1, so actions are scaled, unless the
dataset comes from Stable-Baselines3.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ...core.encodings.output_files import LatchedFile
from ...core.errors import FormatError, SchemaError
from ...core.format import fs
from ...core.format.contracts import Array
from ...core.format.converter import Chosen
from ...core.format.files import no_match, open_regular
from ...core.ted.episodes import EndReason
from ...core.ted.schema import NEXT, NEXT_REWARD, NEXT_TERMINATED, NEXT_TRUNCATED, Field, Key, field_named
from ..files.exports import RowSink, leaves_of, only_leaf, space_of_fields, space_of_json

_MARK = "rbtool_export"
_ENVIRONMENT = "environment"
_MADE = re.compile(rb"\x80\x05cstable_baselines3\.common\.buffers\n.*?" + _MARK.encode(), re.DOTALL)
_HEAD = 200
_CHUNK_BYTES = 4 << 20
_ALL = ""
"""The name of the part if observations are a single array."""
_CLASSES = {False: "ReplayBuffer", True: "DictReplayBuffer"}


class Sb3Exporter(RowSink):
    """Writes a pickle of protocol 5; memory is bounded."""

    @classmethod
    def made(cls, path: Path) -> bool:
        """Return whether the file begins like the pickle of a buffer with our mark."""
        try:
            with os.fdopen(open_regular(path), "rb") as file:
                return _MADE.match(file.read(_HEAD)) is not None
        except (FormatError, OSError) as error:
            return no_match(error)

    def prepare(self) -> None:
        """Determine the parts of observations, the environments and the spaces."""
        self.refuse({"bfloat16", "complex64", "complex128"}, "Stable-Baselines3")
        observations = leaves_of(self.chosen.fields, "observation")
        single = len(observations) == 1 and len(observations[0].key) == 1
        self._parts = {_ALL if single else field.key[-1]: field for field in observations}
        if len(self._parts) < len(observations) or any(len(field.key) > 2 for field in observations):
            names = ", ".join(field.name for field in observations)
            raise SchemaError(
                f"Stable-Baselines3 does not have nested observations, but there are {names}",
                hint="rename fields first: rbtool preprocess SRC --dest DEST --rename OLD=NEW",
            )
        self._action = only_leaf(self.chosen.fields, "action", "Stable-Baselines3")
        after = [(NEXT, *field.key) for field in observations]
        before = [field.key for field in observations]
        self.place([*before, *after, self._action.key, NEXT_REWARD, NEXT_TERMINATED, NEXT_TRUNCATED])
        field_named(self.chosen.fields, NEXT_REWARD)
        self.note_repeated()
        self._environments = self._find_environments()
        self.note_unnumbered([_ENVIRONMENT] if len(self._environments) > 1 else [])
        self._spaces = {role: self._space(role) for role in ("observation", "action")}
        self._bounds = self._bounds_of_actions()
        self.note_both()
        if inside := self.flags_inside():
            self.notes.append(f"dones are set in {inside:,} steps inside episodes, which end there in the buffer")
        for field, name in ((self._action, "actions"), (field_named(self.chosen.fields, NEXT_REWARD), "rewards")):
            if field.dtype == "float64":
                self.notes.append(f"{name} are float32, as in every buffer of Stable-Baselines3")

    def _find_environments(self) -> list[list[int]]:
        """Return the positions of the episodes of each environment."""
        count, texts = len(self.chosen.rows), self.chosen.text or [{}] * len(self.chosen.rows)
        found: dict[str | None, list[int]] = {}
        for position, text in enumerate(texts):
            found.setdefault(text.get(_ENVIRONMENT), []).append(position)
        length = self.chosen.table.length
        if None in found or len({int(length[positions].sum()) for positions in found.values()}) != 1:
            return [list(range(count))]
        return list(found.values())

    def _space(self, role: str) -> Any:
        """Return the space in the manifest, if the fields fit it; else a space of all values of their types."""
        from gymnasium import spaces

        fields = self._parts if role == "observation" else {_ALL: self._action}
        known = self.chosen.reader.manifest.spaces.get(role)
        if known is not None:
            with contextlib.suppress(FormatError):
                space = space_of_json(known, role)
                parts = space.spaces if isinstance(space, spaces.Dict) else {_ALL: space}
                if parts.keys() == fields.keys() and all(_fits(parts[part], field) for part, field in fields.items()):
                    return space
        self.notes.append(f"the {role} space is not known: a space of all values of the type is written")
        made = {
            part: space_of_fields([replace(field, key=(role,), shape=field.shape or (1,))], role)
            for part, field in fields.items()
        }
        return made[_ALL] if _ALL in made else spaces.Dict(made)

    def _bounds_of_actions(self) -> tuple[Array, Array] | None:
        """Return the bounds from which actions are scaled to -1 and 1; None if they are stored unchanged."""
        space = self._spaces["action"]
        if not hasattr(space, "low") or self.chosen.reader.manifest.request.source == "sb3":
            return None
        low, high = (bound.reshape(-1) for bound in (space.low, space.high))
        if not (np.isfinite(low).all() and np.isfinite(high).all() and space.dtype.kind == "f"):
            if space.dtype.kind == "f":
                self.notes.append(
                    "actions are unchanged, because their bounds are not known: Stable-Baselines3 expects actions "
                    "scaled to -1 and 1"
                )
            return None
        if (low != -1).any() or (high != 1).any():
            self.notes.append("actions are scaled from the bounds of their space to -1 and 1, as in Stable-Baselines3")
        return low, high

    def write_rows(self, target: Path, progress: Callable[[int], None]) -> None:
        """Write the pickle piece by piece."""
        with LatchedFile(target) as file:
            for part in self._pickle(progress):
                file.write(memoryview(part))
                file.check()
            fs.fsync(file.descriptor, target)

    def _pickle(self, progress: Callable[[int], None]) -> Iterator[bytes]:
        of_parts, actions = _ALL not in self._parts, math.prod(self._action.shape)
        shapes = {part: field.shape or (1,) for part, field in self._parts.items()}
        state = {
            _MARK: "sb3", "buffer_size": self._rows + 1, "pos": self._rows, "full": False,
            "n_envs": len(self._environments), "optimize_memory_usage": False, "handle_timeout_termination": True,
            "observation_space": self._spaces["observation"], "obs_shape": shapes if of_parts else shapes[_ALL],
            "action_space": self._spaces["action"], "action_dim": actions,
        }  # fmt: skip
        yield pickle.PROTO + b"\x05" + _global("stable_baselines3.common.buffers", _CLASSES[of_parts])
        yield pickle.EMPTY_TUPLE + pickle.NEWOBJ + _small(state) + pickle.MARK
        yield _text("device") + _global("torch", "device") + _text("cpu") + pickle.TUPLE1 + pickle.REDUCE
        for name, before in (("observations", ()), ("next_observations", (NEXT,))):
            yield _text(name) + (pickle.EMPTY_DICT + pickle.MARK if of_parts else b"")
            for part, field in self._parts.items():
                yield _text(part) if of_parts else b""
                yield from self._array(field.numpy, shapes[part], self._chunks((*before, *field.key), progress))
            yield pickle.SETITEMS if of_parts else b""
        single = np.dtype(np.float32)
        kind = single if self._action.dtype == "float64" else self._action.numpy
        for name, dtype, shape, chunks in (
            ("actions", kind, (actions,), self._actions(progress)),
            ("rewards", single, (), self._chunks(NEXT_REWARD, progress)),
            ("dones", single, (), self._flags(NEXT_TERMINATED, progress)),
            ("timeouts", single, (), self._flags(NEXT_TRUNCATED, progress)),
        ):
            yield _text(name)
            yield from self._array(dtype, shape, chunks)
        yield pickle.SETITEMS + pickle.BUILD + pickle.STOP

    @property
    def _rows(self) -> int:
        """The number of steps of each environment."""
        return self.chosen.steps // len(self._environments)

    def _array(self, dtype: np.dtype[Any], shape: tuple[int, ...], chunks: Iterator[Array]) -> Iterator[bytes]:
        """Pickle an array as NumPy does, but piece by piece, with a row of zeros after the rows in `chunks`."""
        lead = (self._rows + 1, len(self._environments))
        zeros = bytes(dtype.itemsize * math.prod((lead[1], *shape)))
        yield _global("numpy._core.numeric", "_frombuffer") + pickle.MARK
        yield pickle.BYTEARRAY8 + (lead[0] * len(zeros)).to_bytes(8, "little")
        for rows in chunks:
            yield np.ascontiguousarray(rows, dtype).tobytes()
        yield zeros + _small(dtype) + _small((*lead, *shape)) + _text("C") + pickle.TUPLE + pickle.REDUCE

    def _chunks(self, key: Key, progress: Callable[[int], None] | None) -> Iterator[Array]:
        """Yield rows `[n, environments, *shape]` of a field."""
        field = field_named(self.chosen.fields, key)
        size = max(1, _CHUNK_BYTES // max(1, field.row_bytes * len(self._environments)))
        columns = [_Column(self.chosen, key, positions) for positions in self._environments]
        for start in range(0, self._rows, size):
            stop = min(start + size, self._rows)
            yield np.stack([column.read(start, stop) for column in columns], axis=1)
            if progress is not None:
                progress((stop - start) * len(columns) * field.row_bytes)

    def _actions(self, progress: Callable[[int], None]) -> Iterator[Array]:
        for rows in self._chunks(self._action.key, progress):
            if self._bounds is None:
                yield rows
            else:
                low, high = self._bounds
                yield 2.0 * ((rows.reshape(*rows.shape[:2], -1) - low) / (high - low)) - 1.0

    def _flags(self, key: Key, progress: Callable[[int], None]) -> Iterator[Array]:
        """Yield `dones` for the key of `terminated`, and `timeouts` for the key of `truncated`."""
        both = (self._chunks(one, progress if one == key else None) for one in (NEXT_TERMINATED, NEXT_TRUNCATED))
        reason, done = self.chosen.table.end_reason, 0
        opened = [reason[positions[-1]] == EndReason.END_OF_FILE for positions in self._environments]
        for terminated, truncated in zip(*both, strict=True):
            flags = terminated | truncated if key == NEXT_TERMINATED else truncated & ~terminated
            done += len(flags)
            if done == self._rows:  # an episode in which the recording stopped has no flag in the buffer
                flags[-1, opened] = False
            yield flags


class _Column:
    """The rows of a field in one environment, whose episodes have these `positions` among the chosen ones."""

    def __init__(self, chosen: Chosen, key: Key, positions: Sequence[int]) -> None:
        self._reader, self._key = chosen.reader, key
        self._spans = [chosen.episode(position) for position in positions]
        self._stops = np.cumsum([stop - start for start, stop in self._spans])

    def read(self, start: int, stop: int) -> Array:
        parts, number = [], int(np.searchsorted(self._stops, start, side="right"))
        while start < stop:
            _, last = self._spans[number]
            offset = last - int(self._stops[number])  # from a row of the environment to its row in the dataset
            end = min(stop, int(self._stops[number]))
            parts.append(self._reader.read(self._key, start + offset, end + offset))
            start, number = end, number + 1
        return np.concatenate(parts)


def _fits(space: Any, field: Field) -> bool:
    """Whether the rows of a field have the element type and shape of a space."""
    if type(space).__name__ == "Discrete":
        return field.shape in {(), (1,)} and field.numpy.kind in "iu"
    return bool(space.shape == field.shape and space.dtype == field.numpy)


def _global(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def _text(text: str) -> bytes:
    data = text.encode()
    return pickle.BINUNICODE + len(data).to_bytes(4, "little") + data


def _small(value: object) -> bytes:
    """Pickle a value for use within another pickle, without the opcodes at the start and the end."""
    return pickle.dumps(value, protocol=3)[2:-1]
