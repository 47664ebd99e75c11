"""Lance tables: LeRobot's datasets in Lance, and tables of frames, are read."""

from __future__ import annotations

from ...core.declarations import FormatDeclaration

__all__ = ["FORMATS"]

FORMATS = (
    FormatDeclaration(
        name="lance",
        package=__name__,
        order=19,
        reader="reader:LanceReader",
        title="Lance",
        found="meta/info.json with storage_format lance, or frames.lance without data; a Lance table",
        ends="episode_index, as in LeRobot",
        final="no",
        extra="lance",
        keeps_video=True,
        layout="packed",
    ),
)
