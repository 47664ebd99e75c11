"""The 179 datasets that D4RL publishes: the file of each, the time limit of its environment, and known checksums.

`datasets.tsv` has a line for each id. Several ids may share a file: the long-horizon editions of the Adroit data differ
from the others in the time limit alone.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

from ...core.errors import DatasetNotFoundError
from ...core.remote.catalogue import not_found

_TABLE = Path(__file__).with_name("datasets.tsv")
_V0_ANTMAZE = (
    "timeouts in the v0 files of antmaze are out of step with the resets of its environment (D4RL issue 77): the v2 "
    "file has them repaired"
)
_SUCCESSORS = {
    r"(pen|door|hammer|relocate)-(human|cloned|expert)": r"\1-\2",
    r"antmaze-(umaze|medium|large)(-play|-diverse)?": r"antmaze-\1\2",
    r"kitchen-(complete|partial|mixed)": r"kitchen-\1",
    r"maze2d-(open|umaze|medium|large)(-dense)?": r"pointmaze-\1\2",
    r"minigrid-(fourrooms(-random)?)": r"minigrid-\1",
}
"""Ids of D4RL whose successor in Minari has a name of the same form; both without their version."""


@dataclass(frozen=True, slots=True)
class D4rlDataset:
    """A published dataset.

    `file` is its path below the base URL, `horizon` the most steps that an episode of its environment has. `size` (in
    bytes) and `sha256` are None where they are not known.
    """

    id: str
    file: str
    horizon: int
    size: int | None
    sha256: str | None

    @property
    def file_name(self) -> str:
        """The name of the file, as in the cache of the d4rl package."""
        return self.file.rpartition("/")[2]

    @property
    def is_antmaze(self) -> bool:
        """Whether `terminals` mark rows near a goal, and only `timeouts` the ends of episodes."""
        return self.id.startswith("antmaze-")

    @property
    def known_problems(self) -> tuple[str, ...]:
        """Sentences on what is known to be wrong with the published file."""
        return (_V0_ANTMAZE,) if self.is_antmaze and self.id.endswith("-v0") else ()

    @property
    def fetch_command(self) -> str:
        """The command that downloads it."""
        return f"rbtool download d4rl {self.id}"

    @property
    def replacement(self) -> str:
        """What can be had instead while D4RL's server is down: a command."""
        bare = re.sub(r"-v\d+$", "", self.id)
        for pattern, successor in _SUCCESSORS.items():
            found = re.fullmatch(pattern, bare)
            if found:
                return f"rbtool download minari {found.expand(successor)}"
        return f"rbtool list --remote minari {bare.removeprefix('bullet-').partition('-')[0]}"


@functools.cache
def published() -> dict[str, D4rlDataset]:
    """All datasets by id, in the order of their ids."""
    rows = [line.split("\t") for line in _TABLE.read_text(encoding="ascii").splitlines()[1:]]
    datasets = [
        D4rlDataset(name, file, int(horizon), int(size) if size else None, sha256 or None)
        for name, file, horizon, size, sha256 in rows
    ]
    return {dataset.id: dataset for dataset in sorted(datasets, key=lambda dataset: dataset.id)}


def dataset_named(dataset_id: str) -> D4rlDataset:
    """Return the dataset of an id, or raise DatasetNotFoundError that names the nearest ids."""
    found = published().get(dataset_id)
    if found is None:
        raise not_found(dataset_id, list(published()), "d4rl")
    return found


def dataset_of_file(name: str) -> D4rlDataset | None:
    """Return the dataset whose file has this name; of several the one with the shortest id, None where there is none.

    `name` may bear a number, as browsers add it to a second download: `hopper_medium-v2 (1).hdf5`.
    """
    bare = re.sub(r" ?\(\d+\)(?=\.hdf5$)", "", name)
    found = [dataset for dataset in published().values() if dataset.file_name == bare]
    return min(found, key=lambda dataset: (len(dataset.id), dataset.id), default=None)


def same_file(dataset: D4rlDataset) -> list[D4rlDataset]:
    """Return the other datasets that have the same file."""
    return [other for other in published().values() if other.file == dataset.file and other.id != dataset.id]


def not_in_cache(dataset: D4rlDataset, folder: Path, variable: str) -> DatasetNotFoundError:
    """Make the error for a dataset whose file is not in the cache of the d4rl package."""
    return DatasetNotFoundError(
        f"the local d4rl cache {folder} has no dataset {dataset.id!r}: looked for {dataset.file_name}",
        hint=f"{dataset.fetch_command} fetches it; {variable} names the folder, if it is another",
    )
