"""Operations that choose episodes: by number, or by what the episode table says of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...errors import UsageError
from ...format import COLUMNS, Array, EpisodeTable, parse_episodes, select_episodes
from ..expressions import Condition, Name, parse_condition
from .base import EpisodeChoice

__all__ = ["TABLE_NAMES", "Episodes", "Filter"]

_KNOWN = {name: dtype == "bool" for name, dtype in COLUMNS.items() if name not in {"explicit_start", "start"}}
_KNOWN["done"] = True

TABLE_NAMES = tuple(sorted(_KNOWN))
"""What conditions on episodes can speak of."""


@dataclass(frozen=True)
class Episodes(EpisodeChoice):
    """Takes the episodes of these numbers, `0:100,250`, as the source counts them."""

    name: ClassVar[str] = "episodes"
    numbers: str

    def __post_init__(self) -> None:
        parse_episodes(self.numbers)

    def keeps(self, table: EpisodeTable) -> Any:
        chosen = select_episodes(parse_episodes(self.numbers), table.episode.tolist())
        return np.isin(table.episode, chosen)


@dataclass(frozen=True)
class Filter(EpisodeChoice):
    """Takes the episodes of which a condition holds, such as `length > 50 and return > 200`.

    Names are the columns of the episode table, and `done`, which is terminated or truncated. What is true or false
    need not be compared. The `seed` of an episode
    without one compares like NaN: unlike everything.
    """

    name: ClassVar[str] = "filter"
    condition: str

    def __post_init__(self) -> None:
        self._parsed()

    def _parsed(self) -> Condition:
        condition = parse_condition(self.condition, _KNOWN)
        for name in condition.names:
            if name.element:
                raise UsageError(f"the condition {self.condition!r} names {name}, but episodes have one {name.field}")
        return condition

    def keeps(self, table: EpisodeTable) -> Any:
        condition = self._parsed()
        asks = any(name.field == "return" for name in condition.names)
        if asks and len(table) and np.isnan(table.total_reward).all():
            raise UsageError(
                f"the condition {self.condition!r} names return, which is not known of any episode",
                hint="n-step data must keep next.original_reward, the reward of every step",
            )
        return condition.holds(_values(table), len(table))


def _values(table: EpisodeTable) -> Mapping[Name, Array]:
    columns = table.columns()
    if not table.has_seed.all():
        columns["seed"] = np.where(table.has_seed, table.seed.astype(np.float64), np.nan)
    columns["done"] = table.terminated | table.truncated
    return {Name(name, ()): column for name, column in columns.items()}
