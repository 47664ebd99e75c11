"""OGBench's npz files: read and downloaded."""

from __future__ import annotations

from ...core.declarations import FormatDeclaration

__all__ = ["FORMATS"]

FORMATS = (
    FormatDeclaration(
        name="ogbench",
        package=__name__,
        order=3,
        reader="reader:OgbenchReader",
        source="reader:OgbenchSource",
        title="OGBench",
        example=("cube-single-play-v0", "cube-single-play"),
        cache_variable="OGBENCH_DATASET_DIR",
        found="npz with observations, actions and terminals, and without rewards or with valids",
        ends="the row of the last observation, marked by terminals or valids; truncated",
        final="yes",
    ),
)
