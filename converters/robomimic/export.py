"""Exports to an HDF5 file in robomimic's layout, with a group for each episode.

    data/demo_N            the group of episode N; its attributes are num_samples, the seed, and texts
      actions, rewards     action and next.reward
      dones                the ends of episodes; or the source's own dones, if it was a robomimic file with dones
      obs/NAME             observation.NAME; a single array of observations is `obs/flat`, as in robomimic's gym
                           environments
      next_obs/NAME        the observation after each step
      states               state; a group of states after each step, with initial_state, if these are stored too
      NAME                 info.NAME
    mask/NAME              the splits of a dataset that was converted from robomimic
    attributes of data     total, and env_args: the source's, or the name of the dataset

robomimic has a single flag for the end of an episode. The attribute `rbtool_export` of each group says whether the
episode was terminated or truncated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import h5py
import numpy as np

from ...core.errors import FormatError
from ...core.format.documents import dump_json, parse_json
from ...core.ted.schema import (
    NEXT,
    NEXT_REWARD,
    NEXT_TERMINATED,
    NEXT_TRUNCATED,
    Key,
    file_stem,
    state_keys,
)
from ..files.exports import leaves_of, only_leaf
from ..files.hdf5 import MARK, H5Sink

_DONES: Key = (NEXT, "info", "dones")
_FLAT = "flat"
_LONGEST = 1 << 16
"""The largest text, in bytes, that is stored in the header of a group; longer ones are variable-length strings."""
_GYM = 2
"""The number that robomimic uses for the type of gym environments."""


class RobomimicExporter(H5Sink):
    """Writes a group for each episode; memory is bounded by an episode."""

    format = "robomimic"

    def prepare(self) -> None:
        """Choose the path of every field."""
        self.refuse({"bfloat16"}, "HDF5")
        fields, manifest = self.chosen.fields, self.chosen.reader.manifest
        keys, states = {field.key for field in fields}, set(state_keys(fields))
        self._names: dict[str, Key] = {"actions": only_leaf(fields, "action", "robomimic").key}
        self._initial: dict[str, Key] = {}
        if NEXT_REWARD in keys:
            self._names["rewards"] = NEXT_REWARD
        after: list[Key] = []
        for key in (field.key for field in leaves_of(fields, "observation")):
            name = _path(key[1:]) or (_FLAT if key == ("observation",) else _path(key))
            self._names[f"obs/{name}"] = key
            if not self.is_without_ends:
                self._names[f"next_obs/{name}"] = (NEXT, *key)
            after.append((NEXT, *key))
        for key in sorted(keys):
            if key[0] == "state" and key in states:
                self._initial[f"initial_state/{_path(key[1:])}".rstrip("/")] = key
            elif key == ("state",) or key[:2] == (NEXT, "state"):
                self._names[f"states/{_path(key[2:])}".rstrip("/")] = key
            elif key == _DONES and manifest.request.source == self.format:
                self._names["dones"] = key
        paths = {name: path for path, name in manifest.renamed_keys.items()}
        for field in fields:
            if field.key[0] == "info":
                self._names.setdefault(paths.get(field.name, _path(field.key[1:])), field.key)
        self.place([*self._names.values(), *self._initial.values(), NEXT_TERMINATED, NEXT_TRUNCATED], after)
        if not self.is_without_ends:
            self.note_repeated()
        self.note_both()
        if inside := self.flags_inside():
            self.notes.append(f"flags in {inside:,} steps inside episodes are left out: robomimic has none there")
        self._documents: Mapping[str, bytes] = {}
        self._is_ours = manifest.request.source == self.format
        if self._is_ours:
            self._documents = self.chosen.reader.documents()
        else:
            self.notes.append("env_args has the name of the dataset, from which robomimic cannot make an environment")

    def fill(self, h5: h5py.File) -> Iterator[int]:
        """Write one group after the other."""
        data = h5.create_group("data")
        self._write_attributes(h5, data)
        for position, number in enumerate(self.chosen.table.episode.tolist()):
            demo = data.create_group(f"demo_{number}")
            steps = int(self.chosen.table.length[position])
            for name, key in self._names.items():
                rows = self.read(key, position)
                demo.create_dataset(name, data=rows.reshape(steps) if name in {"rewards", "dones"} else rows)
                yield rows.nbytes
            for name, key in self._initial.items():
                rows = self.read(key, position)
                demo.create_dataset(name, data=rows[:1])
                yield rows.nbytes
            flags = [self.read(key, position).reshape(steps) for key in (NEXT_TERMINATED, NEXT_TRUNCATED)]
            if not self._is_ours and "dones" not in self._names:
                demo.create_dataset("dones", data=(flags[0] | flags[1]).astype(np.int64))
            yield sum(one.nbytes for one in flags)
            self._describe(demo, position)

    def _describe(self, demo: h5py.Group, position: int) -> None:
        """Write the attributes of an episode."""
        table = self.chosen.table
        texts = self.chosen.text[position] if self.chosen.text else {}
        for name, text in texts.items():
            # The reader stores a long text as a document, whose name is the text of the episode.
            value = self._documents[text].decode() if text in self._documents else _value(text)
            if isinstance(value, str) and len(value) > _LONGEST:
                demo.attrs.create(name, value.encode(), dtype=h5py.string_dtype())
            else:
                demo.attrs[name] = value
        if table.has_seed[position]:
            demo.attrs["seed"] = int(table.seed[position])
        demo.attrs["num_samples"] = int(table.length[position])
        demo.attrs[MARK] = "terminated" if table.terminated[position] else "truncated"

    def _write_attributes(self, h5: h5py.File, data: h5py.Group) -> None:
        """Write the attributes of the file and of `data`, and the splits."""
        known = parse_json(self._documents.get("metadata.json", b"{}"), "metadata.json of the source")
        for group, name in ((h5, "attributes"), (data, "data")):
            for key, value in (known.get(name) or {}).items():
                if key not in {"total", "env_args"}:
                    group.attrs[key] = value
        data.attrs["total"] = self.chosen.steps
        made = {"env_name": self.chosen.reader.manifest.request.id, "type": _GYM, "env_kwargs": {}}
        data.attrs["env_args"] = self._documents.get("env_args.json", dump_json(made).encode()).decode()
        demos = {f"demo_{number}" for number in self.chosen.table.episode.tolist()}
        splits = parse_json(self._documents.get("mask.json", b"{}"), "mask.json of the source")
        for name, members in splits.items():
            there = [one.encode() for one in members if one in demos]
            h5.create_dataset(f"mask/{name}", data=np.array(there or [b""])[: len(there)])


def _path(key: Key) -> str:
    return "/".join(map(file_stem, key))


def _value(text: str) -> Any:
    """Return the value of the attribute that became the text of an episode, which is JSON for numbers and lists."""
    try:
        return parse_json(text.encode(), "an attribute")
    except FormatError:
        return text
