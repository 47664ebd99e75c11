"""Classification tables of OpenML as contextual bandits: downloaded, encoded, and opened as buffers."""

from __future__ import annotations

from ...core.declarations import FormatDeclaration

__all__ = ["FORMATS"]

FORMATS = (
    FormatDeclaration(
        name="openml",
        package=__name__,
        order=80,
        reader="reader:OpenmlReader",
        source="reader:OpenmlSource",
        title="OpenML",
        example=("magic", "magic"),
        found="only by rbtool download openml ID: seven tables, in ARFF",
        ends="every row is an episode of one step, terminated",
        final="no",
    ),
)
