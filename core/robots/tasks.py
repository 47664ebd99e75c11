"""The tasks of episodes: what a robot was told to do, as text."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import UsageError, did_you_mean
from ..format.documents import dump_json
from ..format.episodes import parse_episodes, select_episodes
from ..preprocess.operations.base import (
    BoundOperation,
    Discount,
    FieldChanges,
    Fields,
    Operation,
    RowOperation,
    pairs_of,
)
from ..preprocess.processor import EpisodeTexts

_TASK = "language_instruction"
_TASKS = "language_instructions"
"""The name of a text of episodes with the tasks of an episode that has several, as a list in JSON."""


def _tasks_of(text: dict[str, str]) -> list[str]:
    """Return the tasks of an episode, in the order in which they begin."""
    if _TASK in text:
        return [text[_TASK]]
    return [str(task) for task in json.loads(text.get(_TASKS, "[]"))]


def _with_tasks(text: dict[str, str], tasks: Sequence[str]) -> dict[str, str]:
    others = {name: value for name, value in text.items() if name not in (_TASK, _TASKS)}
    found = {_TASK: tasks[0]} if len(tasks) == 1 else {_TASKS: dump_json(list(tasks))} if tasks else {}
    return others | found


class _TaskOperation(RowOperation):
    """Changes the texts of episodes, and leaves their rows as they are."""

    def plan(self, fields: Fields) -> BoundOperation:
        for field in fields:
            if field.role == "text" and field.key[-1] == _TASK:
                raise UsageError(
                    f"rows have tasks of their own, in {field.name}, and {self.name} changes those of episodes",
                    hint=f"leave that field out first: rbtool preprocess DATASET --exclude {field.name} --dest DEST",
                )
        return FieldChanges(fields, {})


@dataclass(frozen=True)
class SetTask(_TaskOperation):
    """Sets the task of some episodes, which are given by the source's numbers like `0:50,75`.

    It takes the place of the tasks that they had. Numbers are those of `--episodes`: a range takes the episodes that
    exist, a single number has to exist.
    """

    name: ClassVar[str] = "task"
    episodes: str
    text: str

    @classmethod
    def from_option(cls, value: Any, discount: Discount) -> Iterable[Operation]:
        return [
            cls(numbers, str(text)) for numbers, text in pairs_of(value, cls.name, "episodes=text, like 0:50='pick'")
        ]

    def __post_init__(self) -> None:
        with self._named():
            parse_episodes(self.episodes)
        if not self.text.strip():
            raise UsageError(f"the task of episodes {self.episodes} is empty, expected a text")

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Name this option in errors about the numbers of episodes."""
        try:
            yield
        except UsageError as error:
            message = error.message.replace("--episodes", f"--{self.name}")
            raise UsageError(message, hint=error.hint) from None

    def texts(self, numbers: Sequence[int], texts: EpisodeTexts) -> EpisodeTexts:
        with self._named():
            chosen = set(select_episodes(parse_episodes(self.episodes), numbers))
        known = texts or [{}] * len(numbers)
        return [
            _with_tasks(text, [self.text]) if number in chosen else text
            for number, text in zip(numbers, known, strict=True)
        ]


@dataclass(frozen=True)
class RenameTask(_TaskOperation):
    """Gives a task another text in all episodes that have it; also a task that others have, which joins them."""

    name: ClassVar[str] = "rename-task"
    task: str
    to: str

    @classmethod
    def from_option(cls, value: Any, discount: Discount) -> Iterable[Operation]:
        return [cls(old, str(new)) for old, new in pairs_of(value, cls.name, "old=new, like 'pick=pick the cube'")]

    def texts(self, numbers: Sequence[int], texts: EpisodeTexts) -> EpisodeTexts:
        known = dict.fromkeys(task for text in texts for task in _tasks_of(text))
        if self.task not in known:
            there = ", ".join(map(repr, known)) or "none"
            raise UsageError(
                f"no episode has the task {self.task!r}{did_you_mean(self.task, known)}", hint=f"the tasks are {there}"
            )
        # The list of an episode keeps its length: rows name its tasks by their order in it.
        return [
            _with_tasks(text, [self.to if task == self.task else task for task in _tasks_of(text)]) for text in texts
        ]
