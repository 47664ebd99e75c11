"""Proposes a map for a table, from the names that columns commonly have."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ...core.format.locate import ColumnView, Overview
from .boundaries import DONE_NAMES
from .columns import TableColumn, TableFile
from .mapping import parts, quoted_name
from .opening import kind_of, open_table

_OBSERVATION = ("observation", "observations", "obs", "state", "states", "s")
_NEXT = (
    "next_observation", "next_observations", "next_obs", "obs_next", "observation_next", "next_state", "next_states",
    "state_next", "new_obs", "obs2", "next.observation", "next.observations", "next.obs", "next.state",
)  # fmt: skip
_ACTION = ("action", "actions", "act", "acts", "a")
_REWARD = ("reward", "rewards", "rew", "rews", "r")
_TERMINATED = (
    "terminated", "terminations", "termination", "terminal", "terminals", "is_terminated", "is_terminal",
)  # fmt: skip
_TRUNCATED = ("truncated", "truncations", "truncation", "timeout", "timeouts", "time_limit", "is_truncated")
_NO_FLAGS = frozenset(
    {
        "valid", "valids", "is_valid", "mask", "masks", "not_done", "not_dones", "dones_float", "is_first", "is_last",
        "first", "last", "step_type", "absorbing", "discount", "discounts",
    }
)  # fmt: skip
"""Columns that qualify what flags mean: next to one of them, a flag may mark a row that is no step, or not all ends."""
_KEY = (
    "episode", "episode_id", "episode_index", "episode_idx", "episode_num", "episode_no", "episode_number",
    "ep", "eps_id", "traj", "traj_id",
    "traj_no", "traj_num", "trajectory", "trajectory_id",
    "demo", "demo_id",
)  # fmt: skip
_LANGUAGE = ("language_instruction", "instruction", "task", "language", "prompt")
_NUMBERED = re.compile(r"(.*?)(\d+)")
_MOST_LISTED = 64


def overview(path: Path, files: str | None = None) -> Overview | None:
    """Return the columns of the table at a path with a proposal for a map; None where there is no table.

    `files` is a pattern of the files of a folder that are the table.
    """
    if files is None and kind_of(path) is None:
        return None
    with open_table(path, files=files) as file:
        proposal = _Proposal(file)
        proposal.options |= {} if files is None else {"files": files}
        columns = tuple(
            ColumnView(
                name=one.name, dtype=one.dtype, shape=one.shape, rows=one.rows, key=proposal.keys.get(one.name, ""),
                why=one.why,
            )
            for one in file.columns.values()
        )  # fmt: skip
        notes = (*file.notes, *(one.note for one in file.columns.values() if one.note))
        size = sum(one.stat().st_size for one in file.files())
        return Overview(file.kind, "table", columns, proposal.options, (*notes, *proposal.doubts), size)


class _Proposal:
    """What the columns of a file may be: `keys` by column, `options` of the reader, `doubts` in sentences."""

    def __init__(self, file: TableFile) -> None:
        self._columns = [one for one in file.columns.values() if not one.why or one.pickled]
        self._files = len(file.starts)
        self.keys: dict[str, str] = {}
        self.doubts: list[str] = []
        self.options: dict[str, object] = {}
        flags = self._flags()
        key = self._scalar(_KEY, "episode", text=True)
        after = self._vector(_NEXT, "next.observation")
        pairs = {"observation": self._vector(_OBSERVATION, "observation"), "action": self._vector(_ACTION, "action")}
        reward = self._scalar(_REWARD, "reward")
        pairs["reward"] = quoted_name(reward) if reward is not None else None
        pairs["next.observation"] = after
        self._complete(pairs)
        for one in self._free(text=True):
            if one.is_text and not one.shape and _plain(one) in _LANGUAGE and "language_instruction" not in pairs:
                pairs["language_instruction"] = quoted_name(one.name)
                self.keys[one.name] = "language_instruction"
        self.options["map"] = [f"{name}={columns}" for name, columns in pairs.items() if columns is not None]
        self._propose_ends(flags, key, rewarded=reward is not None)
        if key is not None:
            self.options["episode_key"] = key
        if pickled := [one.name for one in self._columns if one.pickled and one.name in self.keys]:
            self.options["trust_pickle"] = True
            what = f"{pickled[0]} is a pickle" if len(pickled) == 1 else f"{', '.join(pickled)} are pickles"
            self.doubts.append(f"{what}, which can run anything: --trust-pickle is for files whose origin you trust")
        self.doubts += _length_doubts([one for one in self._columns if one.name in self.keys])

    def _flags(self) -> list[str | None]:
        """The columns of termination and time limit; one called `done` stands for whichever of the two is missing."""
        flags = [self._scalar(_TERMINATED, "terminated"), self._scalar(_TRUNCATED, "truncated")]
        missing = "terminated" if flags[0] is None else "truncated"
        if None in flags and (done := self._scalar(DONE_NAMES, missing)) is not None:
            flags[flags.index(None)] = done
        return flags

    def _propose_ends(self, flags: list[str | None], key: str | None, *, rewarded: bool) -> None:
        """Propose the flags, and say what they are taken for where only one of them is there.

        It is taken for termination, but for a time limit in data without rewards, which were collected without a task.
        """
        odd = [one.name for one in self._columns if one.is_scalar and _plain(one) in _NO_FLAGS]
        named = [name for name in flags if name is not None]
        if named and odd:
            self.keys = {name: label for name, label in self.keys.items() if name not in named}
            self.options["ends"] = "TERMINATED,TRUNCATED"
            self.doubts.append(
                f"{odd[0]} says something about ends or steps, too: name the flags once you know what "
                f"{' and '.join(named)} {'mean' if len(named) > 1 else 'means'} next to it"
            )
            return
        if not named:
            if key is None and self._files:
                self.doubts.append(f"each of {self._files:,} files is an episode")
            elif key is None:
                self.options["ends"] = "TERMINATED,TRUNCATED"
                self.doubts.append(
                    "no column states where episodes end: name the flags, or the column with the episode"
                )
            return
        if flags[1] is None and not rewarded:
            flags = [None, flags[0]]
            self.keys[named[0]] = "truncated"
        self.options["ends"] = ",".join(name or "-" for name in flags).removesuffix(",-")
        if flags[1] is None:
            self.doubts.append(f"{named[0]} is taken for termination; for time limits write --ends -,{named[0]}")
        elif flags[0] is None:
            self.doubts.append(f"{named[0]} is taken for time limits; for termination write --ends {named[0]}")

    def _complete(self, pairs: dict[str, str | None]) -> None:
        """Propose the columns that are left where no name stands for an observation."""
        if pairs["observation"] is None:
            free = (one for one in self._free() if not one.pickled)
            left = [one for one in free if not one.shape]
            taken = left if pairs["action"] is not None and len(left) <= _MOST_LISTED else []
            self.keys |= {one.name: "observation" for one in taken}
            pairs["next.observation"] = None if taken else pairs["next.observation"]
            pairs["observation"] = ",".join(quoted_name(one.name) for one in taken) or "COLUMN"
            what = "the columns that are left are proposed" if taken else "name the columns of the observation"
            self.doubts.append(f"no column is called observation: {what}")
        if pairs["action"] is None:
            pairs["action"] = "COLUMN"
            self.doubts.append("no column is called action: name it, or leave it out")
        if pairs["reward"] is None:
            self.doubts.append("no column is called reward: the dataset would have none")

    def _free(self, *, text: bool = False) -> Iterator[TableColumn]:
        return (one for one in self._columns if one.name not in self.keys and (text or not one.is_text))

    def _scalar(self, names: Sequence[str], label: str, *, text: bool = False) -> str | None:
        found = [one for one in self._free(text=text) if one.is_scalar and _plain(one) in names]
        found.sort(key=lambda one: (names.index(_plain(one)), len(parts(one.name))))
        if not found:
            return None
        self.keys[found[0].name] = label
        return found[0].name

    def _vector(self, names: Sequence[str], label: str) -> str | None:
        """A column of one of these names, a group, or columns with numbers."""
        for name in names:
            for column in self._free():
                if ".".join(parts(column.name)).lower() == name:
                    self.keys[column.name] = label
                    return quoted_name(column.name)
            inside = [one for one in self._free() if parts(one.name)[0].lower() == name and len(parts(one.name)) > 1]
            if inside:
                group = parts(inside[0].name)[0]
                self.keys |= {one.name: ".".join((label, *parts(one.name)[1:])) for one in inside}
                return f"{quoted_name(group)}.*" if quoted_name(group) == group else f'"{group}.*"'
            numbered = [(one, match[1]) for one in self._free() if (match := _NUMBERED.fullmatch(one.name))]
            same = [(one, prefix) for one, prefix in numbered if prefix.lower().rstrip("_-") == name]
            if same and len({prefix for _, prefix in same}) == 1:
                self.keys |= {one.name: label for one, _ in same}
                return quoted_name(f"{same[0][1]}*")
        return None


def _plain(column: TableColumn) -> str:
    """The own name of a column as the lists above have it: `traj id` is `traj_id`."""
    return re.sub(r"[ -]+", "_", parts(column.name)[-1].strip().lower())


def _length_doubts(columns: Iterable[TableColumn]) -> Iterator[str]:
    rows = {one.name: one.rows for one in columns}
    if len(set(rows.values())) > 1:
        listed = ", ".join(f"{name} {count:,}" for name, count in rows.items())
        yield f"the columns have different numbers of rows ({listed}): each has to have one a step"
