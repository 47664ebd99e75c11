"""The options of verbs, each defined once, for the function, the command line, the request and the provenance.

The options object of a verb has a field for each of its options: type and default are those of the function, and the
help page of the command line is made of what `option` adds. To add an option, add its field here and use it in the
verb, which takes it under the same name; a test compares the two.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from ..declarations import declared, packed_by_default
from ..errors import UsageError


@dataclass(frozen=True, slots=True)
class Option:
    """What is known of an option beyond its type and default.

    `metavar` and `help` are for the help page, where `panel` is the heading it stands under; `flag` is its name there
    if it is not that of the field. `values` is the type of what is typed if it differs from the type of the field, and
    `choices` are all values of an option that has few. Numbers are at least `least`. `recorded` marks options that
    change the resulting data and have no entry of their own in a request: they are among its `options`. `raw` marks
    those that only raw datasets of other libraries have.
    """

    help: str
    metavar: str | None = None
    flag: str | None = None
    panel: str | None = None
    values: Any = None
    choices: tuple[str, ...] = ()
    least: int | None = None
    recorded: bool = False
    raw: bool = False


def option(default: Any, help: str, metavar: str | None = None, **more: Any) -> Any:
    """Return the field of an option; `more` are further fields of `Option`."""
    return dataclasses.field(default=default, metadata={"option": Option(help, metavar, **more)})


@dataclass(frozen=True, kw_only=True)
class VerbOptions:
    """Base of the options objects."""

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Take the options among the arguments of a verb, as `locals()` gives them; UsageError for invalid ones."""
        return cls(**{name: arguments[name] for name in cls.described()})

    @classmethod
    def described(cls) -> dict[str, Option]:
        """Return what is known of each option, by the name of its field."""
        return {one.name: one.metadata["option"] for one in dataclasses.fields(cls)}

    def __post_init__(self) -> None:
        for name, about in self.described().items():
            value = getattr(self, name)
            if about.least is not None and value is not None and value < about.least:
                raise UsageError(f"--{name.replace('_', '-')} is {value}, expected {about.least} or more")

    def recorded(self) -> dict[str, Any]:
        """Return the options for a request and the provenance; {} for the defaults."""
        return {name: value for name, value in self._set().items() if self.described()[name].recorded}

    def raw(self) -> dict[str, Any]:
        """Return the options that only raw datasets have, those that are set."""
        return {name: value for name, value in self._set().items() if self.described()[name].raw}

    def _set(self) -> dict[str, Any]:
        found = {one.name: (getattr(self, one.name), one.default) for one in dataclasses.fields(self)}
        return {name: value for name, (value, default) in found.items() if value != default}


_RAW = "Datasets of other libraries"
_LAYOUTS = ("ted", "packed")

_compress = partial(
    option, (), "For packed: observation.image=zstd:3, or lz4. Repeatable.", "FIELD=HOW", values=list[str]
)
_dry_run = partial(option, False, "Show what would be written, and write nothing.")
_episodes = partial(option, None, "Only these episodes, by the source's numbers.", "A:B,C")
_final_step = partial(
    option,
    "auto",
    "Last steps without an observation after them: auto keeps those that are terminated.",
    choices=("auto", "drop", "repeat"),
    raw=True,
)
_force = partial(option, False, "Replace an existing dataset or checkpoint.")
_layout = partial(
    option,
    None,
    "ted: plain tensors; packed: smaller, faster random batches when I/O-bound. Default: ted; packed for "
    f"{packed_by_default()}.",
    choices=_LAYOUTS,
)
_num_workers = partial(option, 0, "Processes that read and write a raw dataset; 0: this one alone.", "N", raw=True)
_root = partial(
    option, None, "Where datasets are stored. Default: $RBTOOL_HOME, else the user's cache.", "DIR", values=str
)
_skip_bad = partial(
    option, False, "Convert the sound episodes of a damaged dataset, and name the others.", recorded=True
)


@dataclass(frozen=True, kw_only=True)
class ConvertOptions(VerbOptions):
    """The options of `convert`."""

    episodes: str | None = _episodes(raw=True)
    max_episodes: int | None = option(None, "Only the first N of these.", "N", least=1, recorded=True, raw=True)
    layout: str | None = _layout()
    compress: Sequence[str] = _compress()
    final_step: str = _final_step()
    root: str | os.PathLike[str] | None = _root()  # noqa: RUF009 - a field
    skip_bad: bool = _skip_bad()
    force: bool = _force()
    dry_run: bool = _dry_run()
    num_workers: int = _num_workers()
    engine: str = option(
        "local",
        "Where those processes are: here, or on a Ray cluster that shares the folders.",
        choices=("local", "ray"),
    )
    resume: bool = option(False, "Continue what those processes left when they were interrupted.")
    format: str | None = option(
        None,
        "The format, instead of detecting it; see rbtool list --formats.",
        "FORMAT",
        flag="--from",
        panel=_RAW,
        raw=True,
    )


_caches = ", ".join(f"${one.variable}" for one in declared() if one.variable)


@dataclass(frozen=True, kw_only=True)
class DownloadOptions(VerbOptions):
    """The options of `download`."""

    local: bool = option(False, f"Take it from the source's own cache ({_caches}); no network.")
    root: str | os.PathLike[str] | None = _root()  # noqa: RUF009 - a field
    episodes: str | None = _episodes()
    revision: str | None = option(None, "A branch, tag or commit of the remote.", "REV")
    exact_id: bool = option(False, "Take the id as it is: fill in no version, find no newer name.")
    frozen: bool = option(False, "Fail if the remote has other files now than those it was made from.")
    layout: str | None = _layout()
    compress: Sequence[str] = _compress()
    final_step: str = _final_step()
    num_workers: int = _num_workers()
    skip_bad: bool = _skip_bad()
    keep_source: bool = option(False, "Keep the original files, too.")
    force: bool = _force()
    dry_run: bool = _dry_run()
