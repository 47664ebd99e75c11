"""V-D4RL's folders of pixels: npz episodes (64px) and HDF5 shards (84px), read, downloaded, and opened as buffers."""

from __future__ import annotations

from ...core.declarations import FormatDeclaration

__all__ = ["FORMATS"]

FORMATS = (
    FormatDeclaration(
        name="vd4rl",
        package=__name__,
        order=4,
        reader="reader:Vd4rlReader",
        source="reader:Vd4rlSource",
        title="V-D4RL",
        example=("main/walker_walk/random/64px", "walker_walk random 64px"),
        found="npz files with image, action, reward and is_first or the like; HDF5 with observation and step_type",
        ends="the end of the file, marked by is_last (64px); step_type 2 (84px); discount 0 is a termination",
        final="yes",
    ),
)
