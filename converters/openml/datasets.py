"""The seven datasets: which table of OpenML each is, and how its columns are encoded."""

from __future__ import annotations

from dataclasses import dataclass

from ...core.errors import DatasetNotFoundError, did_you_mean


class UnknownTableError(DatasetNotFoundError, RuntimeError):
    """A name that none of the datasets has; a RuntimeError too, as TorchRL raises."""


@dataclass(frozen=True, slots=True)
class OpenmlDataset:
    """A dataset: the table `table` in version `version`.

    `one_hot` states that columns of categories become a column for each category, and not one of codes. `target` is
    the column that becomes the label, None for the one that OpenML names; `complete` leaves out rows with a missing
    value.
    """

    id: str
    table: str
    version: int
    one_hot: bool = False
    target: str | None = None
    complete: bool = False


DATASETS = {
    one.id: one
    for one in (
        OpenmlDataset("adult_num", "adult", 1, target="occupation", complete=True),
        OpenmlDataset("adult_onehot", "adult", 1, one_hot=True, target="occupation", complete=True),
        OpenmlDataset("covertype", "covertype", 3),
        OpenmlDataset("magic", "MagicTelescope", 1),
        OpenmlDataset("mushroom_num", "mushroom", 1),
        OpenmlDataset("mushroom_onehot", "mushroom", 1, one_hot=True),
        OpenmlDataset("shuttle", "shuttle", 1),
    )
}


def dataset_named(name: str) -> OpenmlDataset:
    """Return the dataset of a name, or raise UnknownTableError (DatasetNotFoundError and RuntimeError)."""
    if name not in DATASETS:
        raise UnknownTableError(
            f"openml has no dataset {name!r} that is known here{did_you_mean(name, DATASETS)}",
            hint=f"known: {', '.join(DATASETS)}; any other table can be converted with --from table",
        )
    return DATASETS[name]
