"""The DQN Replay dataset of Atari games: checkpoints of replay buffers, read, downloaded, and opened as buffers."""

from __future__ import annotations

from ...core.declarations import FormatDeclaration

__all__ = ["FORMATS"]

FORMATS = (
    FormatDeclaration(
        name="atari",
        package=__name__,
        order=14,
        reader="reader:AtariReader",
        source="reader:AtariSource",
        title="DQN Replay",
        example=("Pong/1", "Pong 1"),
        cache_variable="ATARI_DATASET_DIR",
        found="a folder with $store$_observation_ckpt.N.gz and the like, or with a folder replay_logs of such files",
        layout="packed",
        ends="terminal; a gap between checkpoints, by their add_count",
        final="no",
    ),
)
