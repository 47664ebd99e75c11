"""The first pass over a Minari dataset: the structure of every episode, and text, but no numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ...core.errors import FormatError
from ...core.format import normal_form
from .extras import ExtraColumns
from .metadata import MinariMetadata
from .required import RequiredColumns
from .store import ColumnPath, EpisodeStore, StoredEpisode, column_name
from .text import LONGEST_ROW, look_at_text

__all__ = ["Survey", "survey"]


@dataclass(frozen=True, slots=True)
class Survey:
    """What is known of the episodes before their rows are read.

    `steps` has the length of each episode of `numbers`, 0 for those in `problems`, which cannot be read.
    """

    numbers: Sequence[int]
    steps: Sequence[int]
    problems: dict[int, FormatError]
    required: RequiredColumns
    extras: ExtraColumns
    attributes: Collection[ColumnPath]

    def require_sound(self, numbers: Sequence[int]) -> None:
        """Raise what is wrong with the first of these episodes that cannot be read."""
        for number in numbers:
            if number in self.problems:
                raise self.problems[number]

    def require_totals(self, metadata: MinariMetadata) -> None:
        """Raise FormatError if the metadata count other episodes or steps than there are."""
        for what, said, found in (
            ("episodes", metadata.total_episodes, len(self.numbers)),
            ("steps", metadata.total_steps, sum(self.steps)),
        ):
            if said is not None and said != found:
                raise FormatError(
                    f"metadata.json says {said:,} {what}, the data hold {found:,}",
                    hint="copy or fetch the dataset again" + self._or_take_what_is_there(),
                )

    def _or_take_what_is_there(self) -> str:
        """Name every episode, the way `--episodes` understands it; a choice is not held against the totals."""
        runs: list[tuple[int, int | None]] = []
        for number in self.numbers:
            if runs and runs[-1][1] == number:
                runs[-1] = runs[-1][0], number + 1
            else:
                runs.append((number, number + 1))
        return f"; to take the episodes that are there, add --episodes {normal_form(runs)}" if runs else ""


def survey(store: EpisodeStore, metadata: MinariMetadata, progress: Callable[[int], None] | None = None) -> Survey:
    """Look at every episode once; what is wrong with one is kept until that one is asked for."""
    required, extras = RequiredColumns(metadata, store), ExtraColumns(len(store.numbers))
    steps, problems, attributes = [0] * len(store.numbers), {}, set[ColumnPath]()
    for index, number in enumerate(store.numbers):
        if progress is not None:
            progress(1)
        try:
            episode = store.episode(number)
            columns = episode.columns()
            steps[index] = required.check(number, columns)
            _look_at_text(required, number, episode, steps[index])
            attributes.update(episode.attribute_paths())
        except FormatError as error:
            problems[number], steps[index] = error, 0
            continue
        extras.look_at(index, number, episode, columns, steps[index])
    extras.finish()
    return Survey(store.numbers, steps, problems, required, extras, attributes)


def _look_at_text(required: RequiredColumns, number: int, episode: StoredEpisode, steps: int) -> None:
    """Find the longest row of the observations and actions that are text."""
    for want in required.columns:
        if want.kind != "text":
            continue
        look = look_at_text(episode, want.path, steps + want.more, f"episode {number}")
        if look.longest > LONGEST_ROW:
            raise FormatError(
                f"{column_name(want.path)!r} of episode {number} has {look.longest:,} bytes of text in row "
                f"{look.longest_row}; rows of up to {LONGEST_ROW:,} bytes can be kept"
            )
        want.longest = max(want.longest, look.longest)
