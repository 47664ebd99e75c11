"""Open X-Embodiment: tar shards of pickled episodes, which are read, downloaded, streamed, and opened as buffers."""

from __future__ import annotations

from ...core.declarations import FormatDeclaration

__all__ = ["FORMATS"]

FORMATS = (
    FormatDeclaration(
        name="openx",
        package=__name__,
        order=16,
        reader="reader:OpenXReader",
        source="shards:OpenXSource",
        title="Open X-Embodiment",
        example=("bridge", "bridge"),
        cache_variable="OPENX_DATASET_DIR",
        found="tar shards with a pickled dictionary of steps for each episode (--trust-pickle)",
        layout="packed",
        ends="the end of a member of an archive; terminated by is_terminal in its last step, else truncated",
        final="where stored",
        streams=True,
    ),
)
