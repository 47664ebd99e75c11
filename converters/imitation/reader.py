"""Reads demonstrations of the imitation library (HumanCompatibleAI). Never imports imitation."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

from ...core.errors import RbtoolError
from ...core.format.contracts import SourceFacts
from ...core.format.read_errors import no_match
from ..files.column_reader import ColumnEpisode, ColumnReader
from ..files.end_meaning import EndMeaning, meaning_of_ends, refuse_ends
from .arrow import FolderTrajectories, looks_like_folder
from .npz import NpzTrajectories, looks_like_npz
from .trajectories import REWS, TIME_LIMIT, Trajectories


class ImitationReader(ColumnReader):
    """An npz file, or a folder that `imitation.data.serialize.save` wrote: Arrow or Parquet files.

    `obs` becomes `observation`, `acts` `action`, `rews` `next.reward`. Episodes are numbered from 0 in their order.
    `terminal` states that a trajectory is complete, and is set where a time limit ended it, too. Infos with numbers in
    every step are `next.info.NAME`.

    Options: `ends` states what `terminal` means, `terminated` (as in imitation, the default) or `truncated`.
    `trust_pickle` allows the infos of npz files to be read.

    Raises FormatError for arrays that contradict each other, CorruptDataError for damage.
    """

    option_names = frozenset({"ends", "trust_pickle"})

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Return whether it has imitation's arrays or columns."""
        try:
            return (path.is_file() and looks_like_npz(path)) or looks_like_folder(path)
        except (
            RbtoolError,
            OSError,
            ValueError,
            LookupError,
            RuntimeError,
            NotImplementedError,
            zipfile.BadZipFile,
        ) as error:
            return no_match(error)

    def on_open(self) -> None:
        """Open the files and read where trajectories end."""
        self._found: Trajectories
        if self.path.is_file() and looks_like_npz(self.path):
            self._found = NpzTrajectories(
                self.path, self.piece_bytes, trusted=bool(self.options.get("trust_pickle"))
            )  # fmt: skip
        else:
            self._found = FolderTrajectories(self.path)
        self.columns = self._found.columns
        self._meaning = self._meaning_of_terminal()
        limits = self._found.limits or [not self._meaning.terminated] * len(self._found.lengths)
        self.episodes = [
            ColumnEpisode(length, terminated=terminal and not limit, truncated=terminal and limit, observed=True)
            for length, terminal, limit in zip(self._found.lengths, self._found.terminal, limits, strict=True)
        ]

    def _meaning_of_terminal(self) -> EndMeaning:
        if self._found.limits is not None:
            refuse_ends(self.path, self.options, f"has infos with {TIME_LIMIT}, which state what ends episodes")
            return EndMeaning(terminated=True, note=f"time limits are those that infos state ({TIME_LIMIT})")
        why = (
            "terminal is set where a trajectory is complete, at terminal states and time limits alike, and imitation "
            "calls both done"
        )
        return meaning_of_ends(self.options, "terminated", why)

    def survey(self, progress: Callable[[int], None]) -> SourceFacts:
        """State the facts; opening read where trajectories end."""
        progress(len(self.episodes))
        notes = [self._meaning.note] if self._meaning.note else []
        fragments = self._found.terminal.count(False)
        if fragments:
            notes.append(
                f"terminal is not set in {fragments:,} of {len(self.episodes):,} trajectories: unfinished episodes"
            )
        if not any(column.field.role == "reward" for column in self.columns):
            notes.append(f"there are no {REWS}, and no next.reward")
        return self.facts_of("imitation", self.path.stem, notes, dropped=self._found.dropped)

    def files(self) -> list[Path]:
        """The file, or the files with rows."""
        return self._found.files()

    def verify_read(self) -> None:
        """Verify the checksums of the arrays that were read."""
        self._found.verify_read()

    def on_close(self) -> None:
        """Close the files."""
        self._found.close()
