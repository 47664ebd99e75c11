"""Demonstrations of the imitation library: npz files and folders of Hugging Face datasets are read."""

from __future__ import annotations

from ...core.declarations import FormatDeclaration

__all__ = ["FORMATS"]

FORMATS = (
    FormatDeclaration(
        name="imitation",
        package=__name__,
        order=21,
        reader="reader:ImitationReader",
        title="imitation",
        found="npz with obs, acts, indices and terminal; Arrow or Parquet with obs, acts and terminal of a trajectory",
        ends="indices, or the row; terminal, which --ends interprets",
        final="yes",
    ),
)
