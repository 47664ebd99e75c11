"""Small datasets to test with: random walks whose rows all differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from ..format.contracts import Array, Piece
from ..format.manifest import Manifest, Request
from ..format.returns import Ingest
from ..format.ted.builder import DatasetBuilder, Origin, provenance_step
from ..ted.schema import ACTION, REWARD, Field, Key, Timing, ted_fields

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
    """Yield episodes of the given lengths and endings as pieces of at most `piece_steps` steps."""
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
    """Write such episodes as a dataset at `folder`, which must not exist."""
    with DatasetBuilder(folder, ted_fields(WALK_FIELDS)) as builder:
        ingest = Ingest(builder, WALK_FIELDS)
        ingest.run(walk_pieces(episodes, seed=seed, piece_steps=piece_steps))
        origin = Origin(
            Request("walks", "walks", "walks/test-v0"), (provenance_step("write_walks", {"seed": seed}, {}),),
            spaces={"observation": {"type": "Box", "low": float("-inf")}}, documents={"metadata.json": b'{"total": 1}'},
        )  # fmt: skip
        return builder.finish(ingest.rows, origin, ingest.text)
