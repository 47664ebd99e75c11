"""What the command line needs when it starts: the formats, their options, and the operations of `preprocess`.

Each package in `rbtool.converters` declares its formats in `FORMATS`, without importing the code that reads them. This
is the only module of core that imports from `rbtool.converters`.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

_CONVERTERS = "rbtool.converters"

LEAVES: dict[str, str] = {
    "dataset_specs": "rbtool.core.specs.interop:dataset_specs",
    "behaviour": "rbtool.core.doctor.rules:ENTRIES",
    "deployed_on_ray": "rbtool.core.buffers.ray_buffer:deployed_on_ray",
    "doctor": "rbtool.core.doctor.doctor:Doctor",
    "download": "rbtool.core.verbs.download:download",
    "foreign_form": "rbtool.core.torchrl.reader:TorchrlForm",
    "hub_address": "rbtool.core.remote.hub_address:HubAddress",
    "list_remote": "rbtool.core.verbs.list:list_remote",
    "normal_map": "rbtool.converters.table.mapping:normal_map",
    "open_stream": "rbtool.core.streams.shards:open_stream",
    "spec_of_space": "rbtool.core.specs.interop:spec_of_space",
    "thresholds": "rbtool.core.doctor.rules:Thresholds",
}
"""The functions and classes of leaves that the trunk calls, as `module:attribute`; removed leaves have no entry."""


def from_leaf(name: str) -> Any:
    """Import an object of a leaf when it is first needed, and return it; `name` is its key in `LEAVES`.

    So the trunk imports no leaf. ModuleNotFoundError if the leaf is not installed.
    """
    if name not in LEAVES:
        raise ModuleNotFoundError(f"this installation of rbtool lacks the part that offers {name!r}")
    module, _, attribute = LEAVES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


@dataclass(frozen=True, slots=True)
class FormatDeclaration:
    """Declares a format: where its code is, and what help and lists say about it.

    Code, named as `module:Class` inside `package` and loaded when it is needed; None if the format has none:

    - `reader`: reads datasets of the format (`Reader`).
    - `source`: a remote catalogue (`Source`).
    - `sink`: writes the format (`Sink`).
    - `steps`: reads files whose rows are TED steps already.
    - `overview`: for a format that is never detected, a function from a path and a file pattern (or None) to an
      `Overview` or None.

    Texts:

    - `order`: position in lists; `title`: the name in sentences.
    - `written`: describes an export; `suffixes`: the file suffixes that select it; `opened`: what follows the path of
      an export, and a line of Python that opens it, with `{}` for the path.
    - `example`: the id of a dataset in the source, and words that name it; `cache_variable`: the variable of
      the source's local cache; `layout`: the layout of its datasets by default.
    - Columns of `rbtool list --formats`: `found` is how files are recognised, `ends` what ends an episode, `final`
      whether files have an observation after the last step, `extra` the extra to install; `streams` states that the
      source has datasets in shards, and `keeps_video` that videos can be kept as they are.
    """

    name: str
    package: str
    order: int
    reader: str | None = None
    source: str | None = None
    sink: str | None = None
    steps: str | None = None
    written: str = ""
    suffixes: tuple[str, ...] = ()
    opened: tuple[str, str] = ("", "")
    title: str = ""
    example: tuple[str, str] = ("", "")
    cache_variable: str = ""
    overview: str | None = None
    layout: Literal["ted", "packed"] = "ted"
    found: str = ""
    ends: str = ""
    final: Literal["", "yes", "no", "where stored"] = ""
    extra: str = ""
    streams: bool = False
    keeps_video: bool = False

    def target(self, kind: Literal["reader", "source", "sink", "steps"]) -> str | None:
        """Return the class of that kind as `module:Class` with the module's full name; None if there is none."""
        found: str | None = getattr(self, kind)
        return None if found is None else f"{self.package}.{found}"


@functools.cache
def declared() -> tuple[FormatDeclaration, ...]:
    """Return all declared formats in their order."""
    converters = importlib.import_module(_CONVERTERS)
    packages = [found.name for found in pkgutil.iter_modules(converters.__path__) if found.ispkg]
    found: list[FormatDeclaration] = []
    for name in packages:
        found += getattr(importlib.import_module(f"{_CONVERTERS}.{name}"), "FORMATS", ())
    return tuple(sorted(found, key=lambda one: (one.order, one.name)))


def format_for(path: str) -> str:
    """Return the export format for the suffix of a path, such as `h5` for `out.hdf5`; "" if no format has it."""
    return next((one.name for one in declared() if one.suffixes and path.lower().endswith(one.suffixes)), "")


def example_source() -> FormatDeclaration:
    """Return the first source, for examples in help and hints; a stand-in if no source is installed."""
    nothing = FormatDeclaration("source", "", 0, title="raw", example=("ID", "a name"))
    return next((one for one in declared() if one.source is not None), nothing)


def source_example() -> str:
    """Return the name of the first source."""
    return example_source().name


def default_layout(name: str) -> Literal["ted", "packed"]:
    """Return the default layout of datasets of a format; `ted` for an unknown name."""
    return next((one.layout for one in declared() if one.name == name), "ted")


def title_of(name: str) -> str:
    """Return the title of a format; for a format of another package its name."""
    return next((one.title for one in declared() if one.name == name and one.title), name)


def packed_by_default() -> str:
    """Return the names of the formats whose datasets are `packed` by default, for help."""
    return ", ".join(one.name for one in declared() if one.layout == "packed")


def declared_sources() -> str:
    """Return the names of all sources, for help."""
    return ", ".join(one.name for one in declared() if one.source is not None)


class ReaderOptions(TypedDict, total=False):
    """The options of `RawOptions` as keyword arguments of functions without an options object."""

    horizon: int | None
    ends: str | None
    filter_key: str | None
    reward: str | None
    map: Mapping[str, Any] | list[str] | str | None
    episode_key: str | None
    files: str | None
    images: str | None
    jpeg: str | None
    trust_pickle: bool
    rlds_last: str | None
    fps: float | None
    episodes_by: str | None
    align: str | None
    clock: str | None
    tolerance: str | None
    drop_late: bool
    action: str | None


@dataclass(frozen=True, slots=True)
class OperationOption:
    """An option of `rbtool preprocess`: an operation, or a value that several operations share.

    `target` is the operation's class: its name in `rbtool.core.preprocess.operations.built_in`, or `module:Class` where
    it is part of a leaf; None for a shared value.
    `values` is the type of the value: bool for a switch, `list[str]` if the option may be repeated. `metavar` and
    `help` appear on the help page; `discounted` marks operations that use the shared `--gamma`.
    """

    name: str
    target: str | None
    values: Any
    metavar: str | None
    help: str
    discounted: bool = False


OPERATION_OPTIONS = (
    OperationOption(
        "episodes", "Episodes", str, "A:B,C", "Only these episodes, by the source's numbers."
    ),
    OperationOption(
        "filter", "Filter", list[str], "CONDITION",
        "Only episodes that meet a condition: length, return, terminated, truncated, done, episode or seed, compared "
        "with numbers and joined by and, or, not.",
    ),
    OperationOption(
        "task", "rbtool.core.robots.episodes:SetTask", list[str], "A:B=TEXT",
        "The task of these episodes, by the source's numbers, like 0:50='pick the cube'.",
    ),
    OperationOption(
        "rename-task", "rbtool.core.robots.episodes:RenameTask", list[str], "OLD=NEW",
        "Give a task another text, in all episodes that have it.",
    ),
    OperationOption(
        "retime", "rbtool.core.robots.episodes:Retime", float, "FPS",
        "Set timestamp to frame / FPS, if it was measured with jitter.",
    ),
    OperationOption(
        "where", "Where", list[str], "CONDITION",
        "Only rows that meet a condition on fields such as reward, truncated (those under next) or observation[3]. An "
        "episode is split at gaps; the row before a gap becomes truncated.",
    ),
    OperationOption(
        "trim-idle", "rbtool.core.robots.episodes:TrimIdle", str, "MADS[:KEEP]",
        "Cut off idle rows at both ends of episodes, in which no number changes by more than MADS (like 0.1) times its "
        "usual change, its MAD; keep KEEP (1) at either end. Fields may follow: 0.1:5:observation.state,action.",
    ),
    OperationOption(
        "resample", "rbtool.core.robots.episodes:Resample", str, "FPS[,FIELD=HOW]",
        "Resample to FPS steps a second. HOW: nearest, linear, hold or sum, like action=sum for deltas; from=50 "
        "gives the rate of a dataset that does not state it.",
    ),
    OperationOption(
        "action-space", "rbtool.core.robots.action_space:ChangeActionSpace", list[str], "PLACE=KIND,…",
        "Change what numbers of the action mean: 0:6=pose,from=euler-xyz,to=6d-rows,as=relative,"
        "state=observation.state[0:6], or 6=gripper,from=0:1,to=-1:1. As: delta, step, relative, …",
    ),
    OperationOption("rename", "Rename", list[str], "OLD=NEW", "Give a field or group another name."),
    OperationOption(
        "cast", "Cast", list[str], "FIELD=TYPE", "Change the element type; what would not fit is refused."
    ),
    OperationOption(
        "cat", "Cat", list[str], "NEW=PART,PART", "Join fields along their last dimension, in the order given."
    ),
    OperationOption(
        "flatten", "Flatten", bool, None, "Make one vector, observation, of all observations by name."
    ),
    OperationOption(
        "crop", "rbtool.core.robots.pictures:CropImages", list[str], "FIELD=AREA",
        "Cut images: HxW from the middle, or TOP,LEFT,HxW; :hwc or :chw says where channels are.",
    ),
    OperationOption(
        "resize", "rbtool.core.robots.pictures:ResizeImages", list[str], "FIELD=HxW",
        "Scale images, height x width; :hwc or :chw says where channels are.",
    ),
    OperationOption(
        "encode", "rbtool.core.robots.pictures:EncodeImages", list[str], "CODEC[:GOP]",
        "Keep images as video: av1 or h264, with a key frame every GOP (2) frames; FIELD=CODEC for some.",
    ),
    OperationOption(
        "n-step", "NStep", int, "N",
        "Make transitions over N steps, never across the end of an episode: discounted reward, the observation after "
        "them, steps_to_next_obs, gamma, multi_step.done and the like; needs --gamma.",
        discounted=True,
    ),
    OperationOption("gamma", None, float, "G", "The discount of n-step and of both returns, up to 1."),
    OperationOption(
        "return-to-go", "AddReturnToGo", bool, None,
        "Add return_to_go, the rewards still to come, which policies are conditioned on; undiscounted without --gamma.",
        discounted=True,
    ),
    OperationOption(
        "mc-return", "AddMcReturn", bool, None,
        "Add mc_return, the discounted return from each step on, to calibrate value functions with; needs --gamma.",
        discounted=True,
    ),
    OperationOption(
        "clip-reward", "ClipReward", str, "LOW:HIGH",
        "Keep next.reward within bounds; write --clip-reward=-1:1.",
    ),
    OperationOption(
        "normalize", "NormalizeFields", list[str], "FIELD[:HOW]",
        "Normalize by mean-std (default), min-max or quantile, the last two to -1 and 1. The statistics cover the "
        "rows that reach it, and all T+1 observations of an episode. The result stores the constants.",
    ),
    OperationOption(
        "select", "Select", list[str], "FIELD,FIELD",
        "Keep only these fields, besides reward, end flags, episode, and what n-step and returns added.",
    ),
    OperationOption(
        "exclude", "Exclude", list[str], "FIELD,FIELD", "Remove these fields; the end flags under next stay."
    ),
)  # fmt: skip
"""All options of operations, in the order in which operations are applied."""
