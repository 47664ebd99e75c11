"""Which columns of a demonstration become which keys of TED."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...core.errors import FormatError, UsageError
from ...core.format.manifest import Dropped
from ...core.ted.schema import ACTION, REWARD, Key, Role, Timing, key_name, safe_part
from ..files.columns import ColumnForm, ColumnPath, column_name
from ..files.episode_groups import GroupColumn, SurveyedColumns

ACTIONS: ColumnPath = ("actions",)
REWARDS: ColumnPath = ("rewards",)
DONES: ColumnPath = ("dones",)
INITIAL = "initial_state"
_OBS, _NEXT_OBS, _STATES = "obs", "next_obs", "states"
_SINGLE = frozenset({ACTIONS, REWARDS, DONES})
_NESTED = frozenset({_OBS, _NEXT_OBS, _STATES, INITIAL})


def is_required(path: ColumnPath) -> bool:
    """Whether episodes must agree on a column."""
    return path in _SINGLE or path[0] in _NESTED


def most_more_rows(path: ColumnPath) -> int | None:
    """How many rows more than steps a column may have; None where it may have any number of rows."""
    return {_OBS: 1, _NEXT_OBS: 0}.get(path[0])


@dataclass(slots=True)
class MappedColumns:
    """The columns with their keys, those left out, keys with other names than in the file, and sentences on it."""

    columns: list[GroupColumn] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def keys_of(found: SurveyedColumns, file: Path, *, zero_reward: bool) -> MappedColumns:
    """Give every column its key; `zero_reward` makes rewards where the file has none.

    FormatError where there is neither an observation nor a state, UsageError for `zero_reward` where there are rewards.
    """
    mapped, required = MappedColumns(), found.required
    if not required:  # every episode has a problem
        return mapped
    observations = [path for path in required if path[0] == _OBS]
    states = [path for path in required if path[0] == _STATES]
    _require_all_longer(found.longer, observations, file)
    mapped.columns += _observed(required, observations, mapped, longer=bool(found.longer))
    if not observations:
        if not states:
            raise FormatError(f"{file} has neither obs nor states with a row a step: there is nothing to observe")
        mapped.notes.append("there is no obs: the states are the observations")
    mapped.columns += _states(required, states, mapped, as_observation=not observations)
    mapped.columns.append(GroupColumn(ACTIONS, ACTION, "action", "step", required[ACTIONS]))
    if REWARDS in required and zero_reward:
        raise UsageError(f"{file} has rewards of its own", hint="leave out --reward")
    if REWARDS in required:
        mapped.columns.append(GroupColumn(REWARDS, REWARD, "reward", "result", required[REWARDS]))
    elif zero_reward:
        mapped.columns.append(GroupColumn((), REWARD, "reward", "result", ColumnForm("array", "float32")))
        mapped.notes.append("there are no rewards: all are 0, as --reward states")
    else:
        mapped.notes.append("there are no rewards in the file, and no next.reward (--reward zero adds rewards of 0)")
    if DONES in required:
        mapped.columns.append(GroupColumn(DONES, ("info", "dones"), "info", "result", required[DONES]))
    for path, form in found.others.items():
        key = ("info", *map(safe_part, path))
        mapped.columns.append(GroupColumn(path, key, "info", "step", form))
        mapped.renamed[column_name(path)] = key_name(key)
    return mapped


def _require_all_longer(longer: Collection[ColumnPath], observations: list[ColumnPath], file: Path) -> None:
    if longer and len(longer) < len(observations):
        one, other = (
            next(column_name(path) for path in observations if (path in longer) is kind) for kind in (True, False)
        )
        raise FormatError(
            f"{file}: {one!r} has a row more than steps in every episode, and {other!r} has one a step: which rows "
            "belong together cannot be determined"
        )


def _observed(
    required: Mapping[ColumnPath, ColumnForm], observations: list[ColumnPath], mapped: MappedColumns, *, longer: bool
) -> Iterator[GroupColumn]:
    shifted = []
    for path in observations:
        after: ColumnPath = (_NEXT_OBS, *path[1:])
        if longer and after in required:
            raise FormatError(
                f"{column_name(path)!r} has a row more than steps, and there is {column_name(after)!r}: both state "
                "what came after each step"
            )
        if after not in required:
            shifted.append(column_name(path))
        elif required[after] != required[path]:
            raise FormatError(f"{column_name(path)!r} and {column_name(after)!r} have rows of different forms")
        key: Key = ("observation", *map(safe_part, path[1:]))
        stored = after if after in required else None
        yield GroupColumn(path, key, "observation", "state", required[path], stored, longer=longer)
    if shifted and len(shifted) < len(observations):
        mapped.notes.append(f"next_obs lacks {', '.join(name.removeprefix('obs/') for name in shifted)}")
    if longer:
        mapped.notes.append("obs has a row more than steps: the last one is the observation after the last step")
    for path in required:
        if path[0] == _NEXT_OBS and (_OBS, *path[1:]) not in required:
            mapped.dropped.append(Dropped(column_name(path), "obs has nothing of that name"))


def _states(
    required: Mapping[ColumnPath, ColumnForm], states: list[ColumnPath], mapped: MappedColumns, *, as_observation: bool
) -> Iterator[GroupColumn]:
    """States of robosuite are those before a step; a group of states, as Isaac Lab records it, has those after it."""
    role: Role = "observation" if as_observation else "state"
    used = set()
    for path in states:
        key: Key = (role, *map(safe_part, path[1:]))
        initial: ColumnPath = (INITIAL, *path[1:])
        if len(path) == 1:
            timing: Timing = "state" if as_observation else "step"
            yield GroupColumn(path, key, role, timing, required[path])
        elif required.get(initial) == required[path]:
            used.add(initial)
            yield GroupColumn(path, key, role, "state", required[path], initial=initial)
        else:
            yield GroupColumn(path, key, role, "result", required[path])
    if any(len(path) > 1 for path in states):
        mapped.notes.append(
            "states are those after each step, as Isaac Lab records them; initial_state is the one before the first"
        )
    for path in required:
        if path[0] == INITIAL and path not in used:
            mapped.dropped.append(Dropped(column_name(path), "states has nothing of that name: it is a row an episode"))
