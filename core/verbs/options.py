"""The arguments of the verbs. `core/options.py` explains how these classes are used."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from ..declarations import declared
from ..errors import UsageError, require_choice
from ..options import (
    RAW_PANEL,
    PathLike,
    RawOptions,
    VerbOptions,
    WriteOptions,
    compress_option,
    dry_run_option,
    episodes_option,
    final_step_option,
    force_option,
    layout_option,
    num_workers_option,
    option,
    required,
    root_option,
    skip_bad_option,
)
from ..progress import Progress

if TYPE_CHECKING:
    import numpy as np

format_option = partial(
    option, None, "The format, instead of detecting it; see rbtool list --formats.", "FORMAT", flag="--from",
    panel=RAW_PANEL, raw=True,
)  # fmt: skip


@dataclass(frozen=True)
class ConvertOptions(RawOptions, WriteOptions):
    """The arguments of `convert`."""

    path: PathLike
    dest: PathLike
    _: KW_ONLY
    episodes: str | None = episodes_option(raw=True)
    max_episodes: int | None = option(
        None, "Only the first N episodes, or the first N of those chosen.", "N", least=1, recorded=True, raw=True
    )
    layout: str | None = layout_option()
    compress: Sequence[str] = compress_option()
    final_step: str = final_step_option()
    skip_bad: bool = skip_bad_option()
    num_workers: int = num_workers_option()
    engine: str = option(
        "local",
        "Where these processes run: on this machine, or on a Ray cluster that shares the folders.",
        choices=("local", "ray"),
    )
    resume: bool = option(False, "Continue an interrupted run of these processes.")
    format: str | None = format_option()


_caches = ", ".join(f"${one.cache_variable}" for one in declared() if one.cache_variable)


@dataclass(frozen=True)
class DownloadOptions(RawOptions, WriteOptions):
    """The arguments of `download`."""

    source: str
    id: str | None = None
    _: KW_ONLY
    local: bool = option(False, f"Take the dataset from the source's own cache ({_caches}); no network.")
    episodes: str | None = episodes_option()
    revision: str | None = option(None, "A branch, tag or commit of the remote.", "REV")
    exact_id: bool = option(False, "Take the id as it is: do not fill in a version or look for a newer name.")
    frozen: bool = option(False, "Fail if the remote's files differ from those that the stored dataset was made from.")
    layout: str | None = layout_option()
    compress: Sequence[str] = compress_option()
    final_step: str = final_step_option()
    num_workers: int = num_workers_option()
    skip_bad: bool = skip_bad_option()
    keep_source: bool = option(False, "Also keep the original files.")


@dataclass(frozen=True)
class CleanOptions(RawOptions, WriteOptions):
    """The arguments of `clean`."""

    dataset: PathLike
    dest: PathLike
    _: KW_ONLY
    drop: str | Sequence[str] | None = option(
        None,
        "Leave out episodes with findings of these rules, given by id (MOT002) or by name: unreadable, nan, duplicate, "
        "near-duplicate, contained, short, constant, long, return, equal-motion, task, spike, stuck, frozen-state, "
        "limit, chatter, lag, unit, rough, disagreement, pause, frozen-picture, black, glitch, blur, exposure, "
        "equal-cameras, swapped-cameras, late-picture, foreign-picture, look, gap.",
        "NAME,NAME",
        values=list[str],
    )
    dedupe: str | None = option(
        None,
        "Leave out copies of episodes: exact copies only, or also near copies and parts of other episodes.",
        choices=("exact", "near"),
    )
    min_length: int | None = option(None, "Leave out episodes of fewer steps.", "N", least=1)
    trim_idle: bool = option(False, "Cut off long idle starts and ends of episodes, except for 3 steps.")
    fix: str | Sequence[str] | None = option(
        None,
        "stats: leave out statistics that contradict the data; totals: correct the totals; retime: set time stamps to "
        "frame number / rate.",
        "WHAT,WHAT",
        values=list[str],
    )
    full: bool = option(False, "Check all frames of kept videos, not a sample.")
    thresholds: PathLike | None = option(
        None, "A TOML file with thresholds of the rules about behaviour.", "FILE", values=str
    )
    baseline: PathLike | None = option(
        None, "Ignore the findings that rbtool check --json wrote to FILE.", "FILE", values=str
    )
    num_workers: int | None = option(
        None, "Processes; 0: this one alone. Default: one per core, and one to read raw datasets.", "N"
    )
    resume: bool = option(False, "Continue an interrupted run with the same arguments.")
    dry_run: bool = option(False, "Show what would be changed and why, and write nothing.")
    format: str | None = format_option()


_kept_layout = partial(
    option, None, "ted or packed. Default: packed if all sources are, else ted.", choices=("ted", "packed")
)


@dataclass(frozen=True)
class MergeOptions(WriteOptions):
    """The arguments of `merge`."""

    datasets: Sequence[PathLike]
    dest: PathLike
    _: KW_ONLY
    schema: str = option(
        "error",
        "Fields that differ between datasets. error: refuse them; intersect: keep the fields that all have; union: "
        "keep all fields, with zeros and a mask where one is missing.",
        choices=("error", "intersect", "union"),
    )
    cast: bool = option(False, "Convert fields of different dtypes to a dtype that holds all their values.")
    layout: str | None = _kept_layout()
    compress: Sequence[str] | None = compress_option(None)


BENCH_JOBS = ("frames", "chunks", "epoch", "resume")


@dataclass(frozen=True)
class BenchOptions(VerbOptions):
    """The arguments of `bench`."""

    dataset: PathLike
    _: KW_ONLY
    libraries: Sequence[str] = option(
        (), "A library to compare, and the Python of an environment that has it. Default: all installed here.",
        "NAME[=PYTHON]", flag="--library", values=list[str],
    )  # fmt: skip
    jobs: Sequence[str] = option(
        (), "A job to time. Default: all.", "|".join(BENCH_JOBS), flag="--job", values=list[str]
    )
    folder: PathLike | None = option(
        None, "Keep the files that the libraries read in DIR, for the next run.", "DIR", values=str
    )
    prepare: bool = option(False, "Only write the files that the libraries read, and time nothing.")
    batch_size: int = option(32, "Rows per batch.", "N", least=1)
    chunk: int = option(16, "Actions per chunk.", "N", least=1)
    batches: int = option(50, "Batches per round, for the jobs frames and chunks.", "N", least=1)
    rounds: int = option(5, "Timed rounds; the result is their median.", "N", least=1)
    output: PathLike | None = option(None, "Draw a chart as .svg, .png or .pdf.", "FILE", values=str)
    root: PathLike | None = root_option()
    force: bool = option(False, "Replace an existing chart.")
    progress: Progress | None = None


@dataclass(frozen=True)
class ScoreOptions(WriteOptions):
    """The arguments of `score`."""

    dataset: PathLike
    dest: PathLike | None = option(None, "Write a copy of the dataset with the scores to DIR.", "DIR", values=str)


@dataclass(frozen=True)
class SplitOptions(WriteOptions):
    """The arguments of `split`."""

    dataset: PathLike
    dest: PathLike | None = None
    _: KW_ONLY
    train: float | None = option(None, "Fraction of the episodes for training.", "F")
    val: float | None = option(None, "Fraction of the episodes for validation.", "F")
    test: float | None = option(None, "Fraction of the episodes for testing.", "F")
    seed: int | None = option(None, "Seed of the random division. Default: 0.", "N")
    by: str = option(
        "episode",
        "What stays in one part: an episode; content: identical episodes; KEY: episodes with the same value of a "
        "field, a text or their seed.",
        "episode|content|KEY",
    )
    stratify: str | None = option(None, "Spread low and high returns, or scores, over all parts.", "return|SCORE")
    in_order: bool = option(False, "Divide in order instead of at random: the first episodes are for training.")
    allow_duplicates: bool = option(False, "Allow identical episodes in two parts.")
    layout: str | None = _kept_layout()
    compress: Sequence[str] | None = compress_option(None)


@dataclass(frozen=True)
class SaveOptions(WriteOptions):
    """The arguments of `checkpoint.save`."""

    dataset: PathLike
    dest: PathLike
    _: KW_ONLY
    form: Literal["ted", "flat", "nested", "h5"] = dataclasses.field(
        metadata=required(
            "ted: plain rows; flat, nested: each observation once; h5: the same in one HDF5 file.",
            flag="--as",
            choices=("ted", "flat", "nested", "h5"),
        )
    )
    compression: str | None = option(None, "For h5: gzip or lzf, gzip:9 for a level.", "NAME")
    for_library: Literal["torchrl"] | None = option(
        None, "Write the layout of another library, which can then load it.", flag="--for", choices=("torchrl",)
    )
    durable: Literal["full", "data", "none"] = option(
        "full",
        "What survives a power failure. full: the checkpoint; data: the bytes of the files; none: nothing for sure.",
        choices=("full", "data", "none"),
    )


@dataclass(frozen=True)
class LoadOptions(VerbOptions):
    """The arguments of `checkpoint.load`."""

    checkpoint: PathLike
    dest: PathLike
    _: KW_ONLY
    layout: str = option(
        "ted",
        "ted: plain tensors; packed: smaller, faster random batches when I/O-bound.",
        choices=("ted", "packed"),
    )
    compress: Sequence[str] = compress_option()
    force: bool = force_option()
    dry_run: bool = dry_run_option()
    progress: Progress | None = None


@dataclass(frozen=True)
class RecordOptions(VerbOptions):
    """The arguments of `record`."""

    env_id: str
    dest: PathLike
    _: KW_ONLY
    episodes: int = dataclasses.field(metadata=required("How many episodes to record.", "N"))
    policy: str | Callable[[Any], Any] = option(
        "random",
        "Actions: random, the controller that rbtool has for CartPole-v1 and Pendulum-v1, or a function of the "
        "observation.",
        "random|expert|FILE.py:NAME",
        values=str,
    )
    seed: int | None = option(None, "Episode k is reset with the seed N + k. Default: drawn.", "N")
    num_envs: int = option(1, "Environments in parallel; the episodes do not depend on it.", "K")
    max_steps: int | None = option(None, "Truncate episodes after N steps.", "N")
    render: bool = option(False, "Record rendered frames in the field pixels.")
    resume: bool = option(False, "Continue a recording that was interrupted.")
    progress: Progress | None = None


@dataclass(frozen=True)
class MigrateOptions(VerbOptions):
    """The arguments of `migrate`."""

    paths: PathLike | Sequence[PathLike]
    _: KW_ONLY
    dry_run: bool = dry_run_option()
    progress: Progress | None = None


_sinks = {one.name: one for one in declared() if one.sink is not None}
_suffixes = ", ".join(suffix for one in _sinks.values() for suffix in one.suffixes)
_written = "; ".join(f"{name}: {one.written}" if one.written else name for name, one in _sinks.items())


@dataclass(frozen=True)
class ExportOptions(WriteOptions):
    """The arguments of `export`."""

    dataset: PathLike
    dest: PathLike
    _: KW_ONLY
    to: str | None = option(None, f"{_written}. Default: by the suffix of DEST, {_suffixes}.", choices=tuple(_sinks))
    episodes: str | None = episodes_option()
    fps: float | None = option(None, "Steps per second, for lerobot and mcap. Default: as the source states.", "N")
    names: Sequence[str] = option(
        (), "Names for the components of a vector, for lerobot: action=x,y,grip.", "KEY=A,B", values=list[str]
    )
    robot_type: str | None = option(None, "The robot, for lerobot. Default: as the source states.", "NAME")
    modality: PathLike | None = option(
        None, "A modality.json for GR00T, for lerobot. Default: the source's.", "FILE", values=str
    )
    skip_bad: bool = skip_bad_option()


@dataclass(frozen=True)
class UploadOptions(WriteOptions):
    """The arguments of `upload`."""

    dataset: PathLike
    address: str
    _: KW_ONLY
    private: bool = option(False, "Make the repository private; refuse a public one.")
    license: str | None = option(None, "The licence: mit, cc-by-4.0. Default: the one on the repository's card.", "ID")
    message: str | None = option(None, "The commit message.", "TEXT")
    revision: str | None = option(None, "The branch, created if it does not exist. Default: main.", "BRANCH")
    allow_errors: bool = option(False, "Upload even if check finds errors; the dataset card lists them.")
    force: bool = option(False, "Replace the files of the repository; its history keeps them.")
    dry_run: bool = option(False, "Show what would be done, and send nothing.")


@dataclass(frozen=True)
class FramesOptions(VerbOptions):
    """The arguments of `frames`."""

    dataset: PathLike
    output: PathLike
    _: KW_ONLY
    episode: int = dataclasses.field(metadata=required("The number of the episode.", "K"))
    field: str | None = option(None, "The field to show. Default: the first field of images.", "KEY")
    steps: str | None = option(None, "Only these steps, or a single one. Default: all.", "A:B")
    fps: float | None = option(None, "Frames per second. Default: as the data states, else 30.", "N")
    scale: int = option(1, "Repeat each pixel N times.", "N")
    root: PathLike | None = root_option()
    force: bool = option(False, "Replace an existing file.")
    progress: Progress | None = None


_EPOCHS = frozenset({"drop_last", "shuffle"})
_SLICES = frozenset({"slice_len", "num_slices", "anchor", "strict", "pad", "batched"})
_PRIORITIES = frozenset({"alpha", "beta", "priority"})
SAMPLERS: Mapping[str, frozenset[str]] = {
    "random": frozenset(),
    "without-replacement": _EPOCHS,
    "slice": _SLICES | {"weight"},
    "slice-without-replacement": _SLICES | _EPOCHS,
    "prioritized": _PRIORITIES,
    "prioritized-slice": _SLICES | _PRIORITIES,
}
"""The options of each sampler, by its name on the command line."""

_DEFAULT_BATCH = 256
SECONDS = 2.0


@dataclass(frozen=True)
class SampleOptions(VerbOptions):
    """The arguments of `sample`. None, or False for a switch, means that an option is not given.

    Raises UsageError for an unknown sampler, an option that the sampler does not take, values out of range, and options
    that contradict each other.
    """

    dataset: PathLike
    n: int | None = option(None, "How many steps. Default: 256 or close to it.", "N", flag="--number -n --batch-size")
    _: KW_ONLY
    sampler: str = option(
        "random",
        f"How to draw: {', '.join(SAMPLERS)}. Default: random.",
        "NAME",
        choices=tuple(SAMPLERS),
        unset=True,
    )
    slice_len: int | None = option(None, "For slices: steps per slice.", "L", least=1)
    num_slices: int | None = option(None, "For slices: slices per batch.", "K", least=1)
    weight: str | None = option(
        None, "For slice: make episodes (the default) or steps equally likely.", choices=("episode", "step")
    )
    anchor: str | None = option(
        None,
        "For slices: take them from anywhere in an episode (the default), from its start or from its end.",
        choices=("any", "start", "end"),
    )
    strict: bool | None = option(
        None,
        "For slices: leave out episodes shorter than a slice (the default), or take them.",
        flag="--strict/--no-strict",
    )
    pad: bool = option(False, "For slices: take shorter episodes, and repeat their last step.")
    batched: bool = option(False, "For slices: give batches the shape [slices, steps].")
    drop_last: bool = option(False, "Without replacement: leave out an incomplete last batch.")
    shuffle: bool | None = option(None, "Without replacement: draw in order.", flag="--no-shuffle", sets=False)
    alpha: float | None = option(None, "By priority: exponent of the priorities. Default: 0.6.", "A")
    beta: float | None = option(None, "By priority: exponent of the weights. Default: 0.4.", "B")
    priority: str | None = option(
        None, "By priority: the field whose absolute value is the priority, or a score. Default: all equal.", "KEY"
    )
    frame_stack: int | None = option(None, "Stack N frames of an episode, with zeros before its start.", "N")
    frame_keys: Sequence[str] = option(
        (), "For --frame-stack: the fields to stack. Default: all images.", "KEY", flag="--frame-key", values=list[str]
    )
    windows: Sequence[str] = option(
        (),
        "Take KEY at steps A to B - 1 relative to each drawn step, or at times: 0s:0.5s.",
        "KEY=A:B",
        flag="--window",
        values=list[str],
    )
    time: bool = option(False, "Measure how fast batches are drawn.")
    seconds: float | None = option(None, "How long to measure. Default: 2.", "S")
    seed: int | None = option(None, "Seed: the same one gives the same batch.", "S")
    verify: bool = option(False, "Compare all files with their digests first.")
    root: PathLike | None = root_option()

    def __post_init__(self) -> None:
        require_choice("the sampler", self.sampler, SAMPLERS)
        for name, value in self.given().items():
            if name not in SAMPLERS[self.sampler]:
                others = [sampler for sampler, known in SAMPLERS.items() if name in known]
                raise UsageError(
                    f"{_flag(name, value)} is not an option of the sampler {self.sampler}",
                    hint=f"it is for {', '.join(others)}",
                )
        self._check_values()
        if self.frame_stack is None and self.frame_keys:
            raise UsageError("--frame-key needs --frame-stack", hint="add --frame-stack 4")
        if self.frame_stack is not None and self.frame_stack < 1:
            raise UsageError(f"--frame-stack is {self.frame_stack}, expected 1 or more")
        if self.windows and self.frame_stack is not None:
            raise UsageError("--window and --frame-stack are both set, expected one", hint="-3:1 has 4 frames")
        names = [one.rpartition("=")[0] for one in self.windows]
        for name, one in zip(names, self.windows, strict=True):
            if not name or names.count(name) > 1:
                raise UsageError(f"--window is {one!r}, expected KEY=A:B, once per key", hint="--window action=0:16")

    def given(self) -> dict[str, Any]:
        """Return the options of the sampler that were given, by name."""
        return {name: value for name, value in self._set().items() if any(name in known for known in SAMPLERS.values())}

    def _check_values(self) -> None:
        super().__post_init__()
        for name in ("alpha", "beta"):
            number = getattr(self, name)
            if number is not None and not (math.isfinite(number) and number >= 0):
                raise UsageError(f"{_flag(name)} is {number}, expected a finite number from 0")
        for name in ("weight", "anchor"):
            word, words = getattr(self, name), self.described()[name].choices
            if word is not None:
                require_choice(_flag(name), word, words)
        if self.strict and self.pad:
            raise UsageError(
                "--strict and --pad are both set, expected one: --strict leaves short episodes out, --pad fills them up"
            )
        if self.in_slices and self.slice_len is None and self.num_slices is None:
            raise UsageError(
                f"the sampler {self.sampler} needs --slice-len or --num-slices",
                hint="add --slice-len L or --num-slices K",
            )

    @property
    def in_slices(self) -> bool:
        """Whether the sampler draws slices."""
        return "slice_len" in SAMPLERS[self.sampler]

    @property
    def strict_length(self) -> bool:
        """Whether episodes shorter than a slice are left out."""
        return not self.pad if self.strict is None else self.strict

    def batch_size(self) -> int:
        """Return the number of steps of a batch; UsageError if it does not match the slices."""
        n, length, count = self.n, self.slice_len, self.num_slices
        if n is None:
            n = length * count if length and count else _default_for(length or count or 1)
        if n < 1:
            raise UsageError(f"-n is {n}, expected at least 1")
        if length and count and length * count != n:
            raise UsageError(
                f"-n {n}: {count} slices of {length} steps are {length * count}",
                hint=f"-n {length * count}, or leave out -n or one of the others",
            )
        part, what = (length, "the length of a slice") if length else (count, "the number of slices")
        if part and n % part:
            raise UsageError(
                f"a batch is {n} steps, expected a multiple of {what}, {part}",
                hint=f"-n {max(1, round(n / part)) * part}",
            )
        return n

    def seconds_to_measure(self) -> float | None:
        """Return for how many seconds to measure, None to measure nothing; UsageError for an invalid time."""
        if self.seconds is None:
            return SECONDS if self.time else None
        if not self.time:
            raise UsageError("--seconds needs --time", hint="add --time")
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise UsageError(f"--seconds is {self.seconds}, expected a time above 0")
        return self.seconds

    def steps_of_a_slice(self, batch_size: int) -> int:
        """Return the number of steps of a slice."""
        return self.slice_len or batch_size // (self.num_slices or 1)

    def check_lengths(self, lengths: np.ndarray[Any, Any], batch_size: int) -> None:
        """Raise UsageError if every episode is shorter than a slice and short ones are left out."""
        wanted = self.steps_of_a_slice(batch_size)
        if not self.in_slices or not self.strict_length or wanted <= lengths.max():
            return
        raise UsageError(
            f"slices are {wanted} steps, expected at most {lengths.max():,}: the longest of {len(lengths):,} episodes",
            hint="--pad takes shorter ones and fills them up, --no-strict takes them whole",
        )


def _default_for(part: int) -> int:
    """Return the multiple of `part` that is nearest to the default batch."""
    return max(1, round(_DEFAULT_BATCH / part)) * part


def _flag(name: str, value: Any = None) -> str:
    no = "no-" if value is False and name in {"shuffle", "strict"} else ""
    return f"--{no}{name.replace('_', '-')}"
