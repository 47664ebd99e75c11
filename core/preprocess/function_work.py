"""A user's function as the work that is done to the rows."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, get_args

from ..errors import UsageError
from .functions import ChunkFunction
from .work import Context, Started, Unit, Work

__all__ = ["FunctionWork"]


@dataclass(frozen=True)
class FunctionWork(Work):
    """A function by reference, and what one call of it sees.

    `unit` `step`: K rows at once, `[K]`, and it returns any number of rows. `row`: one row, `[]`, and it returns one.
    `episode`: a whole episode, `[T]`, and it returns any number of rows. `vmap` is for unit `row`: True puts all rows
    of a block through `torch.vmap`, False calls the function row by row, None lets `probe` decide.

    UsageError for a unit that there is not, and for `vmap` with another unit than `row`.
    """

    function: ChunkFunction
    unit: Unit = "step"
    vmap: bool | None = None
    whole_episodes: bool = field(init=False, default=False)
    needs_probing: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        if self.unit not in get_args(Unit):
            raise UsageError(f"unit {self.unit!r} is not known; known are {', '.join(get_args(Unit))}")
        if self.vmap and self.unit != "row":
            raise UsageError(f"vmap is for functions of one row, and the unit is {self.unit}", hint="say unit row")
        object.__setattr__(self, "whole_episodes", self.unit == "episode")
        object.__setattr__(self, "needs_probing", self.unit == "row" and self.vmap is None)

    @property
    def label(self) -> str:
        """The function, as people name it."""
        return self.function.label

    def start(self, context: Context) -> Started:
        """Load the function; UsageError where that cannot be done."""
        from .calls import UserFunction  # whoever only describes the work needs no torch
        from .episode_unit import EpisodeUnit
        from .row_unit import RowUnit
        from .step_unit import StepUnit

        function = UserFunction(self.label, self.function.load())
        if self.unit == "row":
            return RowUnit(function, context.seed, self.vmap)
        return (StepUnit if self.unit == "step" else EpisodeUnit)(function, context.seed)

    def arguments(self) -> dict[str, Any]:
        """The function's name and the unit; for unit `row` whether it runs under vmap, None while that is open."""
        vmap = {"vmap": self.vmap} if self.unit == "row" else {}
        return {"function": self.label, "unit": self.unit, **vmap}

    def inputs(self) -> dict[str, str]:
        """Digests of the file of the function and of what it imports from its folder; empty for other functions."""
        return self.function.inputs()

    def keeps_rows(self) -> bool:
        """True for functions of a single row."""
        return self.unit == "row"

    def fingerprint(self) -> str:
        """A digest of what a callable is made of, as far as it can be seen; empty for other functions."""
        return self.function.fingerprint()

    def portable(self) -> Work:
        """Return an equal work that can be pickled."""
        return replace(self, function=self.function.portable())

    def neighbours(self) -> frozenset[str]:
        """Top-level names of the modules beside the function's file that a run has to import anew."""
        return self.function.neighbours()

    def settled(self, answer: bool) -> Work:
        """Return the work that runs under vmap or not."""
        return replace(self, vmap=answer)
