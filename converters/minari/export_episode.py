"""From the rows of TED to the columns of Minari's episodes."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...core.errors import SchemaError
from ...core.format import Array, Chosen
from ...core.ted import (
    ACTION,
    EPISODE,
    FLAGS,
    NEXT,
    NEXT_REWARD,
    NEXT_TERMINATED,
    NEXT_TRUNCATED,
    REWARD,
    EndReason,
    Key,
    key_name,
    state_keys,
)
from ..export.columns import Column, columns_of, decoded

__all__ = ["EpisodeColumns"]

_MADE_ROWS = re.compile(r"(.+) (has no value at reset|is missing) in (\d+) of (\d+) episodes: .*", re.DOTALL)
"""How the conversion says which rows of infos it had to make."""

_FAMILY = {REWARD, *FLAGS}


class EpisodeColumns:
    """Gives episodes as the arguments of Minari's `EpisodeBuffer`.

    `dropped` says which keys have no place there and why; `notes` what is different there.
    """

    def __init__(
        self, chosen: Chosen, spaces: Mapping[str, Any], renamed: Mapping[str, str], said: Sequence[str]
    ) -> None:
        self._chosen = chosen
        self._spaces = spaces
        self._renamed = renamed
        self._original = {after: before for before, after in renamed.items()}
        self._columns = {column.field.key: column for column in columns_of(chosen.fields)}
        self._states = {key for key in state_keys(chosen.fields) if key in self._columns}
        self.dropped: dict[str, str] = {}
        self.notes: list[str] = []
        self._late = set(self._after_steps(said))
        self._used: set[Key] = {EPISODE, NEXT_REWARD, *((NEXT, *flag) for flag in FLAGS)}
        for role in ("observation", "action"):
            self._claim(spaces[role], (role,), (role,))
        for key in (NEXT_REWARD, NEXT_TERMINATED, NEXT_TRUNCATED):
            self._require(key)
        self._infos = dict(self._find_infos())

    def _after_steps(self, said: Sequence[str]) -> Iterator[str]:
        """Yield the names of the columns that no episode of the source had a value of at reset."""
        for match in filter(None, map(_MADE_ROWS.fullmatch, said)):
            name, what, some, every = match.groups()
            if what != "is missing" and some == every:
                yield name
            else:
                self.notes.append(f"{match[0]}, and are written as such")

    def _claim(self, space: Any, role: Key, path: Key) -> None:
        """Find the leaf of every leaf of a space; SchemaError if it is not there or no episode could hold it."""
        children = _children(space)
        if children is not None:
            for name, child in children:
                self._claim(child, role, (*path, name))
            return
        key = self._stored(path)
        self._require(key)
        if role == ("observation",) and key not in self._states:
            raise SchemaError(f"{key_name(key)} is an observation without one after the step, which Minari needs")
        self._used.add(key)

    def _stored(self, path: Key) -> Key:
        name = self._renamed.get(key_name(path), key_name(path))
        return next((key for key in self._columns if key_name(key) == name), path)

    def _require(self, key: Key) -> None:
        if key not in self._columns:
            raise SchemaError(f"there is no {key_name(key)}, which a Minari dataset has to have")

    def _find_infos(self) -> Iterator[tuple[Key, Key]]:
        """Yield the path in the infos of every key that has a place there, with the key."""
        for key in self._columns:
            after = (NEXT, *key)
            if key in self._used or (key[0] == NEXT and key[1:] in self._states):
                continue
            if key[0] == NEXT and key[1:] not in self._columns and key[1:] not in _FAMILY:
                yield self._info_path(key[1:]), key
            elif key in self._states:
                yield self._info_path(key), key
            else:
                why = "it is known before the step alone" if after not in self._columns else "before and after differ"
                self.dropped[key_name(key)] = f"Minari has no place for it: {why}"

    def _info_path(self, key: Key) -> Key:
        name = key_name(key)
        before = self._original.get(name, name)
        # What a name got on the way is a trailing "_"; a dot may be in a part as well.
        plain = itertools.product(*((part, part.removesuffix("_")) for part in key))
        path = next((path for path in plain if key_name(path) == before), key)
        if path[0] != "info":
            self.notes.append(f"{name} is at infos/{'/'.join(path)} there")
            return path
        return path[1:]

    @property
    def info_groups(self) -> list[str]:
        """The names of infos that hold columns of their own."""
        return sorted({path[0] for path in self._infos if len(path) > 1})

    # One episode -----------------------------------------------------------------------------------

    def episode(self, position: int) -> dict[str, Any]:
        """Return the columns of an episode; SchemaError where the next step does not begin with what came after one."""
        start, stop = self._chosen.episode(position)
        table = self._chosen.table
        terminated, truncated = (self._flag(key, start, stop) for key in (NEXT_TERMINATED, NEXT_TRUNCATED))
        if table.end_reason[position] == EndReason.END_OF_FILE:
            truncated = truncated.copy()
            truncated[-1] = False
        observations = self._of_space(self._spaces["observation"], ("observation",), start, stop)
        return {
            "seed": int(table.seed[position]) if table.has_seed[position] else None,
            "options": self._texts(position, "options") or None,
            "observations": observations,
            "actions": self._of_space(self._spaces["action"], ACTION, start, stop),
            "rewards": self._chosen.reader.read(NEXT_REWARD, start, stop).reshape(stop - start),
            "terminations": terminated,
            "truncations": truncated,
            "infos": self._info_columns(position, start, stop),
        }

    def attributes(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield what else is said of each episode, with its number there."""
        for position in range(len(self._chosen.rows)):
            yield position, self._texts(position, "attributes")

    def _flag(self, key: Key, start: int, stop: int) -> Array:
        return self._chosen.reader.read(key, start, stop).reshape(stop - start).astype(bool)

    def _of_space(self, space: Any, path: Key, start: int, stop: int) -> Any:
        children = _children(space)
        if children is None:
            key = self._stored(path)
            return self._state(key, start, stop) if key in self._states else self._read(key, start, stop)
        parts = {name: self._of_space(child, (*path, name), start, stop) for name, child in children}
        return tuple(parts.values()) if _is_tuple(space) else parts

    def _read(self, key: Key, start: int, stop: int) -> Any:
        column: Column = self._columns[key]
        rows = self._chosen.reader.read(key, start, stop)
        if column.length is None:
            return rows
        lengths = self._chosen.reader.read(column.length.key, start, stop)
        return decoded(rows, lengths, key_name(key))

    def _state(self, key: Key, start: int, stop: int) -> Any:
        before, after = self._read(key, start, stop), self._read((NEXT, *key), start, stop)
        if _bits(before[1:]) != _bits(after[:-1]):
            raise SchemaError(
                f"{key_name(key)} after a step is not what the next step of that episode begins with, and Minari keeps "
                "it once",
                hint="export to h5, npz or parquet, which keep both",
            )
        return [*before, after[-1]] if isinstance(before, list) else np.concatenate((before, after[-1:]))

    def _info_columns(self, position: int, start: int, stop: int) -> dict[str, Any]:
        flat: dict[Key, Any] = {}
        for path, key in self._infos.items():
            if key[0] == NEXT:
                flat[path] = self._read(key, start, stop)
            elif key_name(key) in self._late:
                flat[path] = self._read((NEXT, *key), start, stop)
            else:
                flat[path] = self._state(key, start, stop)
        for name, text in (self._chosen.text or [{}] * (position + 1))[position].items():
            if name.split(".")[0] not in ("options", "attributes"):
                path = tuple(name.split("."))
                flat[path[1:] if path[0] == "info" else path] = [text] * (stop - start + 1)
        return _nested(flat)

    def _texts(self, position: int, top: str) -> dict[str, Any]:
        """What is said of an episode below one name: `options`, nested, or `attributes`."""
        said = self._chosen.text
        if said is None:
            return {}
        found = {
            tuple(name.split(".")[1:]): json.loads(text)
            for name, text in said[position].items()
            if name.split(".")[0] == top and "." in name
        }
        return _nested(found) if top == "options" else {"/".join(path): value for path, value in found.items()}


def _children(space: Any) -> list[tuple[str, Any]] | None:
    """The parts of a Dict or Tuple space by the names of their keys, None for other spaces."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        return list(space.spaces.items())
    if isinstance(space, spaces.Tuple):
        return [(str(number), child) for number, child in enumerate(space.spaces)]
    return None


def _is_tuple(space: Any) -> bool:
    from gymnasium import spaces

    return isinstance(space, spaces.Tuple)


def _bits(rows: Any) -> Any:
    """What rows are compared by: NaN equals NaN."""
    return rows if isinstance(rows, list) else np.ascontiguousarray(rows).tobytes()


def _nested(flat: Mapping[Key, Any]) -> dict[str, Any]:
    """Nest by path; a group whose names are 0, 1, … was a tuple."""
    nest: dict[str, Any] = {}
    for path, value in flat.items():
        inner = nest
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
        inner[path[-1]] = value
    return {name: _tuples(value) for name, value in nest.items()}


def _tuples(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    parts = {name: _tuples(part) for name, part in value.items()}
    return tuple(parts.values()) if list(parts) == [str(i) for i in range(len(parts))] else parts
