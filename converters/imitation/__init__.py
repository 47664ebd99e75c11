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
        found="npz with obs, acts, indices and terminal; Arrow or Parquet with obs, acts and terminal per trajectory",
        ends="indices (npz) or the end of a row (folder); --ends interprets terminal",
        final="yes",
    ),
)
