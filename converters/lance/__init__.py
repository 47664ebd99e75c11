"""Lance tables: datasets of LeRobot in Lance, which are read and exported, and single tables of frames."""

from __future__ import annotations

from ...core.declarations import FormatDeclaration

__all__ = ["FORMATS"]

FORMATS = (
    FormatDeclaration(
        name="lance",
        package=__name__,
        order=19,
        reader="reader:LanceReader",
        sink="export:LanceExporter",
        written="LeRobot v3.0 in Lance tables",
        opened=("/frames.lance", "import lance; print(lance.dataset({}).to_table())"),
        title="Lance",
        found="meta/info.json with storage_format lance, or frames.lance without data; a Lance table",
        ends="a change of episode_index, as in LeRobot",
        final="no",
        extra="lance",
        keeps_video=True,
        layout="packed",
    ),
)
