"""Minari's datasets: read, downloaded and exported."""

from __future__ import annotations

from ...core.declarations import FormatDeclaration

__all__ = ["FORMATS"]

FORMATS = (
    FormatDeclaration(
        name="minari",
        package=__name__,
        order=0,
        reader="reader:MinariReader",
        source="source:MinariSource",
        sink="export:MinariExporter",
        title="Minari",
        example=("D4RL/door/human-v2", "door-human-v1"),
        cache_variable="MINARI_DATASETS_PATH",
        found="data/metadata.json with HDF5, Arrow or Parquet files next to it",
        ends="the end of the episode's group, file or folder; terminations and truncations state how",
        final="yes",
        opened=("/data", "import minari; print(minari.MinariDataset({}))"),
    ),
)
