"""Replay buffers that d3rlpy dumps: HDF5 files are read and exported."""

from __future__ import annotations

from ...core.declarations import FormatDeclaration

__all__ = ["FORMATS"]

FORMATS = (
    FormatDeclaration(
        name="d3rlpy",
        package=__name__,
        order=22,
        reader="reader:D3rlpyReader",
        sink="reader:D3rlpyExporter",
        title="d3rlpy",
        written="HDF5 for ReplayBuffer.load",
        opened=(
            "",
            "from d3rlpy import dataset as d; print(d.ReplayBuffer.load(open({}, 'rb'), d.InfiniteBuffer()).size())",
        ),
        found="HDF5 with columns, num_episodes and version at the root",
        ends="the end of the arrays of an episode; terminated if that flag is set, else truncated",
        final="no",
    ),
)
