"""The options of `rbtool preprocess`, by what they are about."""

from __future__ import annotations

import enum
from typing import Annotated, Any, TypeAlias

import typer

__all__ = [
    "Cast",
    "Cat",
    "ChunkSize",
    "ClipReward",
    "Destination",
    "Engine",
    "EngineName",
    "Episodes",
    "Exclude",
    "Filter",
    "Flatten",
    "Function",
    "Gamma",
    "KeepGoing",
    "McReturn",
    "NStep",
    "Normalize",
    "NumFrames",
    "NumWorkers",
    "Pipeline",
    "Rename",
    "Replay",
    "ReplayFilters",
    "Resize",
    "Resume",
    "Retries",
    "ReturnToGo",
    "Seed",
    "Select",
    "ShowPipeline",
    "StartMethod",
    "StartMethodName",
    "Timeout",
    "Unit",
    "UnitName",
    "Where",
]


class UnitName(enum.StrEnum):
    """What one call of a function gets."""

    STEP = "step"
    ROW = "row"
    EPISODE = "episode"


class StartMethodName(enum.StrEnum):
    """How worker processes are started."""

    FORK = "fork"
    SPAWN = "spawn"
    FORKSERVER = "forkserver"


class EngineName(enum.StrEnum):
    """Who does the work."""

    LOCAL = "local"
    RAY = "ray"


_FUNCTION = "A function of yours"
_OPERATIONS = "Operations, done in this order"
_PIPELINE = "Operations in another order, or again"
_RUN = "How it is run"


def _option(name: str, metavar: str | None, about: str, panel: str) -> Any:
    return typer.Option(name, metavar=metavar, help=about, rich_help_panel=panel)


Destination: TypeAlias = Annotated[str | None, typer.Option("--dest", metavar="DIR", help="The folder to write.")]

Function: TypeAlias = Annotated[
    str | None, _option("--fn", "FILE.py:NAME|MODULE:NAME", "The function to run, instead of operations.", _FUNCTION)
]
Unit: TypeAlias = Annotated[
    UnitName,
    _option("--unit", None, "What it gets at a time: K steps, a single row, or a whole episode.", _FUNCTION),
]
Seed: TypeAlias = Annotated[
    int, _option("--seed", "N", "Seeds its random numbers, by chunk, row or episode.", _FUNCTION)
]

Episodes: TypeAlias = Annotated[
    str | None, _option("--episodes", "A:B,C", "Only these episodes, by the source's numbers.", _OPERATIONS)
]
Filter: TypeAlias = Annotated[
    list[str] | None,
    _option(
        "--filter",
        "CONDITION",
        "Only episodes of which it holds: length, return, terminated, truncated, done, episode, seed, compared with "
        "numbers and joined by and, or, not.",
        _OPERATIONS,
    ),
]
Where: TypeAlias = Annotated[
    list[str] | None,
    _option(
        "--where",
        "CONDITION",
        "Only rows of which it holds: fields such as reward, truncated (those under next) or observation[3]. An "
        "episode falls into pieces at gaps; the row before a gap becomes truncated.",
        _OPERATIONS,
    ),
]
Rename: TypeAlias = Annotated[
    list[str] | None, _option("--rename", "OLD=NEW", "Give a field or group another name.", _OPERATIONS)
]
Cast: TypeAlias = Annotated[
    list[str] | None,
    _option("--cast", "FIELD=TYPE", "Change the element type; what would not fit is refused.", _OPERATIONS),
]
Cat: TypeAlias = Annotated[
    list[str] | None,
    _option("--cat", "NEW=PART,PART", "Join fields along their last dimension, in the order given.", _OPERATIONS),
]
Flatten: TypeAlias = Annotated[
    bool, _option("--flatten", None, "Make one vector, observation, of all observations by name.", _OPERATIONS)
]
Resize: TypeAlias = Annotated[
    list[str] | None,
    _option(
        "--resize", "FIELD=HxW", "Scale images, height x width; :hwc or :chw says where channels are.", _OPERATIONS
    ),
]
NStep: TypeAlias = Annotated[
    int | None,
    _option(
        "--n-step",
        "N",
        "Make transitions over N steps, never across the end of an episode: discounted reward, the observation after "
        "them, steps_to_next_obs, gamma, multi_step.done and the like; needs --gamma.",
        _OPERATIONS,
    ),
]
Gamma: TypeAlias = Annotated[
    float | None, _option("--gamma", "G", "The discount of n-step and of both returns, up to 1.", _OPERATIONS)
]
ReturnToGo: TypeAlias = Annotated[
    bool,
    _option(
        "--return-to-go",
        None,
        "Add return_to_go, the rewards still to come, which policies are conditioned on; undiscounted without --gamma.",
        _OPERATIONS,
    ),
]
McReturn: TypeAlias = Annotated[
    bool,
    _option(
        "--mc-return",
        None,
        "Add mc_return, the same sum as what values are calibrated with: discounted, so it needs --gamma.",
        _OPERATIONS,
    ),
]
ClipReward: TypeAlias = Annotated[
    str | None,
    _option("--clip-reward", "LOW:HIGH", "Keep next.reward within bounds; write --clip-reward=-1:1.", _OPERATIONS),
]
Normalize: TypeAlias = Annotated[
    list[str] | None,
    _option(
        "--normalize",
        "FIELD[:HOW]",
        "Bring to a common scale by statistics of the rows that reach it: mean-std (default), min-max or quantile, the "
        "last two to -1 and 1. The constants are stored with the result.",
        _OPERATIONS,
    ),
]
Select: TypeAlias = Annotated[
    list[str] | None,
    _option(
        "--select",
        "FIELD,FIELD",
        "Keep these fields, and besides reward, end flags, episode, and what n-step and returns added.",
        _OPERATIONS,
    ),
]
Exclude: TypeAlias = Annotated[
    list[str] | None,
    _option("--exclude", "FIELD,FIELD", "Let go of these fields; the end flags under next stay.", _OPERATIONS),
]

Pipeline: TypeAlias = Annotated[
    str | None, _option("--pipeline", "FILE", "Do what a TOML file says, in its order.", _PIPELINE)
]
ShowPipeline: TypeAlias = Annotated[
    bool, _option("--show-pipeline", None, "Print the TOML file of what is asked for, and do nothing.", _PIPELINE)
]
Replay: TypeAlias = Annotated[
    str | None,
    _option(
        "--replay",
        "MANIFEST",
        "Do again what made another dataset (its folder or manifest.json), scaled by the same constants.",
        _PIPELINE,
    ),
]
ReplayFilters: TypeAlias = Annotated[
    bool,
    _option(
        "--replay-filters",
        None,
        "With --replay, choose episodes as it did, too: by --episodes and --filter.",
        _PIPELINE,
    ),
]

NumWorkers: TypeAlias = Annotated[
    int | None, _option("--num-workers", "N", "Processes; 0: this one only. Default: one a core.", _RUN)
]
ChunkSize: TypeAlias = Annotated[
    int | None,
    _option(
        "--chunk-size", "K", "Rows a call. Default: 16 chunks or more, of 256 rows at least and 16 MB at most.", _RUN
    ),
]
NumFrames: TypeAlias = Annotated[int | None, _option("--num-frames", "N", "Only the first N steps.", _RUN)]
Resume: TypeAlias = Annotated[
    bool, _option("--resume", None, "Go on with what an earlier run of the same has finished.", _RUN)
]
KeepGoing: TypeAlias = Annotated[
    bool, _option("--keep-going", None, "Where a chunk fails, finish the others before saying so.", _RUN)
]
Timeout: TypeAlias = Annotated[float | None, _option("--timeout", "SECONDS", "End a chunk that takes longer.", _RUN)]
Retries: TypeAlias = Annotated[int, _option("--retries", "N", "How often a chunk that failed is tried again.", _RUN)]
StartMethod: TypeAlias = Annotated[
    StartMethodName | None, _option("--start-method", None, "How processes are started.", _RUN)
]
Engine: TypeAlias = Annotated[
    EngineName, _option("--engine", None, "This machine, or a Ray cluster over a shared folder.", _RUN)
]
