"""Replay buffers of Tianshou: HDF5 files of `save_hdf5` are read."""

from __future__ import annotations

from ...core.declarations import FormatDeclaration

__all__ = ["FORMATS"]

FORMATS = (
    FormatDeclaration(
        name="tianshou",
        package=__name__,
        order=23,
        reader="reader:TianshouReader",
        title="Tianshou",
        found="HDF5 with _meta and _indices or last_index at the root",
        ends="terminated or truncated; if only done is stored, --ends interprets it",
        final="where stored",
    ),
)
