"""Gen-DGRL's archives of Procgen episodes: read, downloaded, and opened as buffers."""

from __future__ import annotations

from ...core.declarations import FormatDeclaration

__all__ = ["FORMATS"]

FORMATS = (
    FormatDeclaration(
        name="gen_dgrl",
        package=__name__,
        order=15,
        reader="reader:GenDgrlReader",
        source="reader:GenDgrlSource",
        title="Gen-DGRL",
        example=("bigfish-1M_E", "bigfish 1M_E"),
        cache_variable="GEN_DGRL_DATASET_DIR",
        found="a .tar.xz, tar or folder of npy files, each a pickled dictionary with observations (--trust-pickle)",
        ends="the end of the file; dones in its last step is a termination",
        final="yes",
    ),
)
