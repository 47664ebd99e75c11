"""Small TED datasets: random walks whose rows all differ, and datasets with every oddity, written from a plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from hypothesis import strategies as st

from ..format.contracts import Array, Piece
from ..format.episodes import EpisodeRow
from ..format.manifest import ENV_METADATA, Manifest, Request, content_digest
from ..format.memmap.builder import DatasetBuilder, Origin, provenance_step
from ..format.memmap.tree import record_file
from ..format.mixture import Member, Mixture
from ..format.packed.builder import write_dataset
from ..format.packed.schema import parse_codecs
from ..format.returns import Ingest
from ..format.returns import running_return as sum_rewards
from ..format.syncing import write_file
from ..open_steps import open_steps
from ..ted.episodes import EndReason, end_reason
from ..ted.schema import (
    ACTION,
    EPISODE,
    FLAGS,
    NEXT,
    NEXT_DONE,
    NEXT_REWARD,
    NEXT_TERMINATED,
    NEXT_TRUNCATED,
    REWARD,
    Field,
    Key,
    Timing,
    is_floating,
    numpy_dtype,
    role_of,
    ted_fields,
)

Ending: TypeAlias = Literal["terminated", "truncated", "both", "open"]

OBSERVATION = ("observation",)
SUCCESS = ("info", "success")
WALK_FIELDS: tuple[tuple[Field, Timing], ...] = (
    (Field(OBSERVATION, "float64", (3,), "observation"), "state"),
    (Field(SUCCESS, "int32", (), "info"), "state"),
    (Field(ACTION, "float32", (2,), "action"), "step"),
    (Field(REWARD, "float64", (), "reward"), "result"),
)


def walk_pieces(
    episodes: Sequence[tuple[int, Ending]], *, seed: int = 0, piece_steps: int = 1 << 30
) -> Iterator[Piece]:
    """Yield random walks of the given lengths and endings as pieces of at most `piece_steps` steps."""
    draw = np.random.default_rng(seed)
    for number, (length, ending) in enumerate(episodes):
        observation = draw.normal(size=3) + np.cumsum(draw.normal(size=(length + 1, 3)), 0)
        success = draw.integers(1, 1000, length + 1).astype(np.int32)
        action = draw.normal(size=(length, 2)).astype(np.float32)
        reward = draw.normal(size=length)
        flags = np.zeros((2, length), bool)
        flags[0, -1], flags[1, -1] = ending in ("terminated", "both"), ending in ("truncated", "both")
        for start in range(0, length, piece_steps):
            stop = min(start + piece_steps, length)
            columns: dict[Key, Array] = {
                OBSERVATION: observation[start : stop + 1],
                SUCCESS: success[start : stop + 1],
                ACTION: action[start:stop],
                REWARD: reward[start:stop],
            }
            yield Piece(
                number, columns, flags[0, start:stop], flags[1, start:stop],
                first=start == 0, last=stop == length, seed=number + 7, text={"task": f"walk {number} é"},
            )  # fmt: skip


def write_walks(
    folder: Path, episodes: Sequence[tuple[int, Ending]], *, seed: int = 0, piece_steps: int = 1 << 30
) -> Manifest:
    """Write random walks as a dataset at `folder`, which must not exist."""
    origin = Origin(
        Request("walks", "walks", "walks/test-v0"), (provenance_step("write_walks", {"seed": seed}, {}),),
        spaces={"observation": {"type": "Box", "low": float("-inf")}}, documents={"metadata.json": b'{"total": 1}'},
    )  # fmt: skip
    return write_pieces(folder, WALK_FIELDS, walk_pieces(episodes, seed=seed, piece_steps=piece_steps), origin)


def write_pieces(
    folder: Path, fields: Sequence[tuple[Field, Timing]], pieces: Iterable[Piece], origin: Origin | None = None
) -> Manifest:
    """Write pieces of episodes as a dataset at `folder`, which must not exist."""
    with DatasetBuilder(folder, ted_fields(fields)) as builder:
        ingest = Ingest(builder, fields)
        ingest.run(pieces)
        return builder.finish(ingest.table, origin or Origin(Request("pieces", "pieces", "pieces"), ()), ingest.text)


def write_packed(source: Path, folder: Path, *compressed: str) -> Manifest:
    """Copy a dataset to layout `packed`, at `folder`, which must not exist. `observation=zstd` compresses a leaf."""
    with open_steps(source) as reader:
        step = provenance_step("write_packed", {}, {"content_digest": reader.manifest.content_digest})
        origin = Origin.of(reader.manifest, reader.documents())
        origin = replace(origin, provenance=(*origin.provenance, step))
        return write_dataset(reader, folder, "packed", origin, parse_codecs(compressed, reader.fields))


def write_mixture(path: Path, *datasets: Path) -> Path:
    """Write a mixture file of datasets with equal weights."""
    write_file(path, Mixture(dataset=tuple(Member(path=str(one), weight=1.0) for one in datasets)).text().encode())
    return path


Presence: TypeAlias = Literal["absent", "zero", "set"]
"""For root flags and the root reward: no field, a field of zeros, or a field with values."""
Kind: TypeAlias = Literal["state", "root", "after", "unlike"]
"""The places of a leaf: root and `next`, root only, `next` only, or root and `next` with different dtypes."""


@dataclass(frozen=True, slots=True)
class PlannedLeaf:
    """A leaf of a plan under its root key."""

    key: Key
    dtype: str
    shape: tuple[int, ...]
    kind: Kind


ODD_LEAVES: tuple[PlannedLeaf, ...] = (
    PlannedLeaf(("observation", "position"), "float64", (3,), "state"),
    PlannedLeaf(("observation", "camera"), "uint8", (4, 5, 3), "state"),
    PlannedLeaf(("observation", "brain"), "bfloat16", (2,), "state"),
    PlannedLeaf(("info", "solved"), "bool", (), "state"),
    PlannedLeaf(("agents", "reward"), "float32", (2, 1), "state"),
    PlannedLeaf(("x",), "int32", (1,), "state"),
    PlannedLeaf(("x.shape",), "uint64", (), "state"),
    PlannedLeaf(("at_root", "wave"), "complex128", (), "state"),
    PlannedLeaf(("explicit_next",), "int16", (3,), "state"),
    PlannedLeaf(("nothing",), "float32", (0,), "state"),
    PlannedLeaf(("a/b: c", ".."), "float16", (2, 2), "state"),
    PlannedLeaf(("mask",), "bool", (1,), "root"),
    PlannedLeaf(("reward", "shaped"), "float64", (1,), "root"),
    PlannedLeaf(("episodes", "start"), "int64", (), "root"),
    PlannedLeaf(("source", "é"), "int8", (3, 0), "root"),
    PlannedLeaf(("explicit_episodes_",), "uint16", (2,), "root"),
    PlannedLeaf(("info", "lap"), "int64", (), "after"),
    PlannedLeaf(("explicit_next_",), "complex64", (2,), "after"),
    PlannedLeaf(("sensor",), "float32", (2,), "unlike"),
)
"""Leaves of every kind and dtype, some with names that checkpoints reserve."""


_DOCUMENTS = {
    ENV_METADATA: b'{"a": Infinity}',
    "data/licence.txt": "© é".encode(),
    "raw.bin": b"\0\xff",
    "none": b"",
}


@dataclass(frozen=True, slots=True)
class DatasetPlan:
    """A plan of a dataset, with an episode for each item of `lengths`, `endings` and `jumps`.

    In an episode that jumps, the next observation of one row differs from the observation of the following row.
    """

    lengths: tuple[int, ...]
    endings: tuple[Ending, ...]
    jumps: tuple[bool, ...]
    leaves: tuple[PlannedLeaf, ...]
    root_flags: Presence = "absent"
    root_reward: Presence = "absent"
    text: bool = False
    documents: bool = False
    seed: int = 0

    def fields(self) -> tuple[Field, ...]:
        """The TED fields in order."""
        return tuple(Field(key, dtype, shape, role_of(key)) for key, dtype, shape in self._keys())

    def _keys(self) -> Iterator[tuple[Key, str, tuple[int, ...]]]:
        yield ("action",), "float32", (2,)
        yield EPISODE, "int64", ()
        for leaf in self.leaves:
            if leaf.kind != "after":
                yield leaf.key, leaf.dtype, leaf.shape
        if self.root_reward != "absent":
            yield REWARD, "float64", (1,)
        if self.root_flags != "absent":
            yield from ((flag, "bool", (1,)) for flag in FLAGS)
        for leaf in self.leaves:
            if leaf.kind != "root":
                yield (NEXT, *leaf.key), "int8" if leaf.kind == "unlike" else leaf.dtype, leaf.shape
        yield NEXT_REWARD, "float64", (1,)
        yield from (((NEXT, *flag), "bool", (1,)) for flag in FLAGS)


def relist(folder: Path, **changes: Any) -> Manifest:
    """Rewrite the manifest of a dataset or checkpoint so that its file list and digests match the files in the folder.

    `changes` are further entries of the manifest to change.
    """
    manifest = Manifest.load(folder)
    kept = [file.path for file in manifest.files if (folder / file.path).is_file()]
    files = tuple(record_file(folder / path, path) for path in kept)
    manifest = replace(manifest, **{"files": files, "content_digest": content_digest(files), **changes})
    manifest.save(folder, at_once=True)
    return manifest


def write_plan(plan: DatasetPlan, folder: Path) -> Manifest:
    """Write the dataset at `folder`, which must not exist."""
    draw = np.random.default_rng(plan.seed)
    with DatasetBuilder(folder, plan.fields()) as builder:
        rows = []
        for number, (length, ending, jump) in enumerate(zip(plan.lengths, plan.endings, plan.jumps, strict=True)):
            columns = _episode(plan, 10 * number + 3, length, ending, jump, draw)
            builder.append(columns)
            rows.append(_row(columns, ending, seed=None if number % 2 else 2**63 + number))
        text = [{"task": f"wash \u2028 {row.episode} é"} if plan.text else {} for row in rows]
        return builder.finish(rows, _origin(plan), text)


def _episode(
    plan: DatasetPlan, number: int, length: int, ending: Ending, jump: bool, draw: np.random.Generator
) -> dict[Key, Array]:
    columns = {field.key: _values(draw, field.dtype, (length, *field.shape)) for field in plan.fields()}
    columns[EPISODE][:] = number
    for leaf in plan.leaves:
        if leaf.kind == "state":
            _join(columns, leaf.key, draw)
            if jump:
                _tear(columns[NEXT, *leaf.key], int(draw.integers(max(1, length - 1))))
    last = np.arange(length)[:, None] == length - 1
    columns[NEXT_TERMINATED] = last & (ending in ("terminated", "both"))
    columns[NEXT_TRUNCATED] = last & (ending in ("truncated", "both", "open"))
    columns[NEXT_DONE] = columns[NEXT_TERMINATED] | columns[NEXT_TRUNCATED]
    for key, presence in ((REWARD, plan.root_reward), *((flag, plan.root_flags) for flag in FLAGS)):
        if presence == "zero":
            columns[key][:] = 0
    return columns


def _join(columns: dict[Key, Array], key: Key, draw: np.random.Generator) -> None:
    """Make each `next` row equal the row after it, and repeat some rows."""
    root, after = columns[key], columns[NEXT, *key]
    for row in np.flatnonzero(draw.random(len(root)) < 0.2)[1:]:
        root[row] = root[row - 1]
    after[:-1] = root[1:]


def _tear(after: Array, row: int) -> None:
    """Flip the highest bit of one number. If the number is 0.0, this only changes its sign."""
    bits = after[row : row + 1].reshape(-1).view(np.uint8)
    if bits.size:
        bits[-1] ^= 1 if after.dtype == np.bool_ else 0x80


def _values(draw: np.random.Generator, name: str, shape: tuple[int, ...]) -> Array:
    """Return numbers that all differ if the type has enough values, with NaN, infinity and -0.0 among floats."""
    dtype = numpy_dtype(name)
    if name == "bfloat16":
        return (draw.normal(size=shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if not is_floating(name):
        return draw.integers(0, 2, shape).astype(bool) if name == "bool" else _integers(draw, dtype, shape)
    values = draw.normal(size=shape).astype(dtype)
    for special in (np.nan, np.inf, -0.0, 0.0):
        values[draw.random(shape) < 0.03] = special
    return values


def _integers(draw: np.random.Generator, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    limits = np.iinfo(dtype)
    return draw.integers(limits.min, limits.max, shape, dtype, endpoint=True)


def _row(columns: dict[Key, Array], ending: Ending, seed: int | None) -> EpisodeRow:
    terminated, truncated = bool(columns[NEXT_TERMINATED][-1, 0]), bool(columns[NEXT_TRUNCATED][-1, 0])
    reason = EndReason.END_OF_FILE if ending == "open" else end_reason(terminated, truncated)
    total = sum_rewards(0.0, columns[NEXT_REWARD])
    number, length = int(columns[EPISODE][0]), len(columns[EPISODE])
    return EpisodeRow(number, length, total, terminated, truncated, reason, seed)


def _origin(plan: DatasetPlan) -> Origin:
    return Origin(
        Request("plan", "plan", "plan/odd-v0"),
        (provenance_step("write_plan", {"seed": plan.seed}, {}),),
        spaces={"observation": {"type": "Box", "high": float("inf")}},
        renamed_keys={"shape": "shape_"},
        notes=("made up",),
        documents=_DOCUMENTS if plan.documents else {},
    )


@st.composite
def dataset_plans(draw: st.DrawFn, max_episodes: int = 5, max_length: int = 6) -> DatasetPlan:
    """Draw plans of a few episodes of different lengths, possibly none, with some of the odd leaves."""
    lengths = tuple(draw(st.lists(st.integers(1, max_length), max_size=max_episodes)))
    endings = tuple(draw(st.sampled_from(get_args(Ending))) for _ in lengths)
    leaves = tuple(draw(st.lists(st.sampled_from(ODD_LEAVES), unique=True, max_size=8)))
    presence: st.SearchStrategy[Presence] = st.sampled_from(get_args(Presence))
    return DatasetPlan(
        lengths=lengths,
        endings=endings,
        jumps=tuple(draw(st.booleans()) for _ in lengths),
        leaves=leaves,
        root_flags=draw(presence),
        root_reward="absent" if _names_reward(leaves) else draw(presence),
        text=draw(st.booleans()),
        documents=draw(st.booleans()),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def _names_reward(leaves: tuple[PlannedLeaf, ...]) -> bool:
    """Return whether `reward` is a nest at the root, so that it cannot be a leaf."""
    return any(leaf.key[0] == "reward" for leaf in leaves)
