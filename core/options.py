"""The arguments of verbs, each defined once: for the function, the command line, the request and the provenance.

Each verb has a frozen dataclass of its arguments. `takes` turns a function of such an object into the verb, whose
arguments have the names, types and defaults of the fields. The help page is made from the texts that `option` adds. To
add an option to a verb, add a field to its class and use it in the verb.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from numbers import Real
from typing import Any, Literal, ParamSpec, TypeAlias, TypeVar, cast, get_type_hints

from .declarations import packed_by_default
from .errors import UsageError, as_kind, require_keywords, simple_kinds
from .progress import Progress, Silent

PathLike: TypeAlias = str | os.PathLike[str]
_Arguments = ParamSpec("_Arguments")
_Asked = TypeVar("_Asked")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Option:
    """Describes an option beyond its type and default.

    Attributes:
        help: the text of the help page.
        metavar: stands for the value on the help page.
        flag: its names on the command line, separated by spaces; by default the name of the field with dashes.
        panel: the heading it stands under.
        values: the type of the value on the command line, if it differs from the type of the field.
        choices: all values, if there are few.
        least: the smallest number allowed.
        unset: the command line shows no default; the help text says what happens without the option.
        sets: for a switch, the value that it sets.
        recorded: the option changes the resulting data and has no entry of its own in a request. It is then among the
            `options` of the request and in the provenance, and `report` repeats it.
        raw: the option applies only to raw datasets of other libraries.
    """

    help: str
    metavar: str | None = None
    flag: str | None = None
    panel: str | None = None
    values: Any = None
    choices: tuple[str, ...] = ()
    least: int | None = None
    unset: bool = False
    sets: bool | None = None
    recorded: bool = False
    raw: bool = False


def option(default: Any, help: str, metavar: str | None = None, **more: Any) -> Any:
    """Return the field of an option; `more` are further attributes of `Option`."""
    return dataclasses.field(default=default, metadata=required(help, metavar, **more))


def required(help: str, metavar: str | None = None, **more: Any) -> dict[str, Any]:
    """Return the metadata for the field of an option without a default."""
    return {"option": Option(help, metavar, **more)}


@dataclass(frozen=True)
class VerbOptions:
    """Base of the dataclasses of arguments."""

    @classmethod
    def described(cls) -> dict[str, Option]:
        """Return the descriptions of the options, by the names of their fields; inherited fields come last."""
        return {one.name: one.metadata["option"] for one in ordered_fields(cls) if "option" in one.metadata}

    def __post_init__(self) -> None:
        for name, about in self.described().items():
            value = getattr(self, name)
            if about.least is None or value is None:
                continue
            number: Any = value if isinstance(value, Real) else math.nan
            if not number >= about.least:
                raise UsageError(f"--{name.replace('_', '-')} is {value!r}, expected {about.least} or more")

    def recorded(self) -> dict[str, Any]:
        """Return the options for a request and the provenance; {} for the defaults."""
        return {name: value for name, value in self._set().items() if self.described()[name].recorded}

    def raw(self) -> dict[str, Any]:
        """Return the options that are set and apply only to raw datasets."""
        return {name: value for name, value in self._set().items() if self.described()[name].raw}

    @property
    def reporter(self) -> Progress:
        """What shows the progress of the verb."""
        return getattr(self, "progress", None) or Silent()

    def _set(self) -> dict[str, Any]:
        found = {one.name: (getattr(self, one.name), one.default) for one in ordered_fields(type(self))}
        return {name: found[name][0] for name in self.described() if found[name][0] != found[name][1]}


def ordered_fields(options: type[Any]) -> list[dataclasses.Field[Any]]:
    """Return the fields of a dataclass, positional arguments first, and its own before inherited ones."""
    own = {name: place for place, name in enumerate(vars(options).get("__annotations__", ()))}
    return sorted(dataclasses.fields(options), key=lambda one: (bool(one.kw_only), own.get(one.name, len(own))))


def takes(
    options: Callable[_Arguments, _Asked],
) -> Callable[[Callable[[_Asked], _Result]], Callable[_Arguments, _Result]]:
    """Decorate a function of an options object, so that callers pass the fields of the object as arguments.

    A misspelt argument raises a TypeError with a suggestion, and a value of another type a UsageError, as with
    `suggests_keywords`.

    >>> @dataclass(frozen=True)
    ... class HalveOptions(VerbOptions):
    ...     number: float
    ...     digits: int = option(2, "Digits of the result.", "N", least=0)
    >>> @takes(HalveOptions)
    ... def halve(asked: HalveOptions) -> float:
    ...     return round(asked.number / 2, asked.digits)
    >>> halve(3.14, digits=1)
    1.6
    """
    kind = cast("type[Any]", options)
    types, known = get_type_hints(kind), [one.name for one in ordered_fields(kind)]
    made = inspect.signature(kind)
    signature = made.replace(parameters=[made.parameters[name].replace(annotation=types[name]) for name in known])
    kinds = simple_kinds({name: types[name] for name in known})

    def decorated(function: Callable[[_Asked], _Result]) -> Callable[_Arguments, _Result]:
        @functools.wraps(function)
        def call(*arguments: _Arguments.args, **given: _Arguments.kwargs) -> _Result:
            require_keywords(function.__name__, given, known)
            try:
                found = signature.bind(*arguments, **given).arguments
            except TypeError as error:
                raise TypeError(f"{function.__name__}(): {error}") from None
            found |= {name: as_kind(name, found[name], kinds[name]) for name in kinds.keys() & found.keys()}
            return function(kind(**found))

        result = function.__annotations__["return"]
        call.__signature__ = signature.replace(return_annotation=result)  # type: ignore[attr-defined]
        call.__annotations__ = types | {"return": result}
        call.__keywords__ = known  # type: ignore[attr-defined]
        return call

    return decorated


# Options that several verbs have ---------------------------------------------------------------------


def compress_option(default: tuple[str, ...] | None = ()) -> Any:
    """Return the field for `--compress`, which compresses fields in layout `packed`."""
    return option(default, "For packed: observation.image=zstd:3, or lz4. Repeatable.", "FIELD=HOW", values=list[str])


RAW_PANEL = "Datasets of other libraries"

dry_run_option = functools.partial(option, False, "Show what would be written, and write nothing.")
episodes_option = functools.partial(option, None, "Only these episodes, by the source's numbers.", "A:B,C")
final_step_option = functools.partial(
    option,
    "auto",
    "Last steps without an observation after them: auto keeps those that are terminated.",
    choices=("auto", "drop", "repeat"),
    raw=True,
)
force_option = functools.partial(option, False, "Replace an existing dataset or checkpoint.")
layout_option = functools.partial(
    option,
    None,
    "ted: plain tensors; packed: smaller, faster random batches when I/O-bound. Default: ted; packed for "
    f"{packed_by_default()}.",
    choices=("ted", "packed"),
)
num_workers_option = functools.partial(
    option, 0, "Processes that read and write a raw dataset; 0: only this one.", "N", raw=True
)
root_option = functools.partial(
    option, None, "Where datasets are stored. Default: $RBTOOL_HOME, else the user's cache.", "DIR", values=str
)
skip_bad_option = functools.partial(
    option, False, "Convert the sound episodes of a damaged dataset, and name the others.", recorded=True
)


@dataclass(frozen=True, kw_only=True)
class WriteOptions(VerbOptions):
    """Options of verbs that write a dataset; they follow a verb's own."""

    root: PathLike | None = root_option()
    force: bool = force_option()
    dry_run: bool = dry_run_option()
    progress: Progress | None = None


def _reader_option(help: str, metavar: str | None = None, default: Any = None, **more: Any) -> Any:
    return option(default, help, metavar, panel=RAW_PANEL, **more)


@dataclass(frozen=True, kw_only=True)
class RawOptions(VerbOptions):
    """Options for reading datasets of other libraries; a reader lists those that it supports in `option_names`."""

    horizon: int | None = _reader_option("Time limit of episodes in steps, for D4RL files without timeouts.", "N")
    ends: str | None = _reader_option(
        "The meaning of a flag that marks both terminations and time limits: terminated or truncated. For a table: the "
        "columns of terminations and of time limits, like terminals,timeouts, or - for none.",
        "HOW",
    )
    filter_key: str | None = _reader_option("Only the episodes of this split, like train.", "NAME")
    reward: str | None = _reader_option("zero: rewards of 0, for a dataset that has none.", "zero")
    map: Mapping[str, Any] | list[str] | str | None = _reader_option(
        "Columns of a table by TED key, like observation=obs.* or action=a_0,a_1, or topics of a robot log, like "
        "action=/command.data, or a TOML file of them. Several may follow one --map.",
        "KEY=COLUMN",
        values=list[str],
    )
    episode_key: str | None = _reader_option(
        "The column of a table that numbers episodes. For a folder: file,COLUMN if each file counts its own, -,COLUMN "
        "if the numbers continue over files.",
        "COLUMN",
    )
    files: str | None = _reader_option(
        "The CSV or Parquet files of a folder that are one table, like '*.csv' or 'runs/**/*.parquet'. Default: all.",
        "PATTERN",
    )
    images: str | None = _reader_option(
        "How images and video are stored: decode (pixels), keep (the files as they are, if the format allows it) or "
        "skip (not at all).",
        "HOW",
    )
    jpeg: str | None = _reader_option(
        "How JPEG is decoded: exact; fast (RLDS): as TensorFlow does; opencv (ALOHA): red and blue swapped.", "HOW"
    )
    trust_pickle: bool = _reader_option(
        "Read pickled data, in a separate process: only arrays, numbers, text and plain containers.",
        default=False,
    )
    rlds_last: str | None = _reader_option(
        "The meaning of the last step of an RLDS episode: observation (only the observation after the step before it), "
        "flagged (only that if the episode ends with is_last) or step. By default, auto, the actions and rewards of "
        "all last steps decide.",
        "HOW",
    )

    fps: float | None = _reader_option("Steps a second of a robot log.", "N")
    episodes_by: str | None = _reader_option(
        "What counts as an episode. CALVIN: recording or annotation. Robot logs: file, gap:2s (until a silence) or "
        "topic:/TOPIC (between markers on a topic).",
        "HOW",
    )
    align: str | None = _reader_option(
        "The values of a robot log at each step: the newest (hold), the nearest, or interpolated (linear); or each "
        "message of a topic is a step. Default: hold.",
        "hold|nearest|linear|reference:/TOPIC",
    )
    clock: str | None = _reader_option(
        "The times of messages of a robot log: of recording (log), measuring (header) or sending (publish). Default: "
        "log.",
        "log|header|publish",
    )
    tolerance: str | None = _reader_option("Mark values of a robot log that are older than this as late.", "50ms")
    drop_late: bool = _reader_option("Leave out steps with late values.", default=False)
    action: str | None = _reader_option(
        "For a robot log without commands: the observation whose next value is the action.", "next:KEY"
    )

    def of_reader(self) -> dict[str, Any]:
        """Return the values of the options of `RawOptions` only, by name."""
        return {one.name: getattr(self, one.name) for one in dataclasses.fields(RawOptions)}


_FUNCTION, _PIPELINE, _RUN = "Your own function", "Operations from a file or another dataset", "How to run it"


@dataclass(frozen=True)
class PreprocessOptions(WriteOptions):
    """The arguments of `preprocess`."""

    dataset: PathLike
    fn: Callable[[Any], Any] | str | None = option(
        None,
        "The function to run, instead of operations.",
        "FILE.py:NAME|MODULE:NAME",
        values=str,
        panel=_FUNCTION,
    )
    dest: PathLike | None = None
    _: KW_ONLY
    unit: Literal["step", "row", "episode"] = option(
        "step",
        "What the function gets in a call: K steps, a single row, or a whole episode.",
        choices=("step", "row", "episode"),
        panel=_FUNCTION,
    )
    seed: int = option(0, "Seed of its random numbers, for each chunk, row or episode.", "N", panel=_FUNCTION)
    hindsight: str | Mapping[str, Any] | None = option(
        None,
        "Relabel this share (0.8) of the steps with goals that their episode achieved: at that step or later (future), "
        "at the end (final) or anywhere (episode). The function returns (reward, terminated) of the steps it gets.",
        "STRATEGY[:RATIO]",
        values=str,
        panel=_FUNCTION,
    )
    operations: Mapping[str, Any] | None = None
    pipeline: PathLike | None = option(
        None, "Apply the operations of a TOML file, in its order.", "FILE", values=str, panel=_PIPELINE
    )
    replay: PathLike | None = option(
        None,
        "Repeat the operations that made another dataset (its folder or manifest.json), with the same constants.",
        "MANIFEST",
        values=str,
        panel=_PIPELINE,
    )
    replay_filters: bool = option(
        False,
        "With --replay, also repeat its choice of episodes and rows: --episodes, --filter, --where, --num-frames.",
        panel=_PIPELINE,
    )
    num_workers: int | None = option(None, "Processes; 0: only this one. Default: one a core.", "N", panel=_RUN)
    chunk_size: int | None = option(
        None, "Rows a call. Default: 16 chunks or more, of 256 rows at least and 16 MB at most.", "K", panel=_RUN
    )
    num_frames: int | None = option(None, "Only the first N steps.", "N", panel=_RUN)
    resume: bool = option(False, "Continue an interrupted run with the same arguments.", panel=_RUN)
    keep_going: bool = option(False, "If a chunk fails, finish the others before the error.", panel=_RUN)
    timeout: float | None = option(None, "Time limit of a chunk.", "SECONDS", panel=_RUN)
    retries: int = option(1, "How often a failed chunk is tried again.", "N", panel=_RUN)
    start_method: str | None = option(
        None, "How processes are started.", choices=("fork", "spawn", "forkserver"), panel=_RUN
    )
    engine: str = option(
        "local", "This machine, or a Ray cluster over a shared folder.", choices=("local", "ray"), panel=_RUN
    )
    skip_bad: bool = skip_bad_option()
    vmap: bool | None = None
