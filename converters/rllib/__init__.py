"""RLlib's recorded experiences: JSON lines and Parquet files are read."""

from __future__ import annotations

from ...core.declarations import FormatDeclaration

__all__ = ["FORMATS"]

FORMATS = (FormatDeclaration(name="rllib", package=__name__, order=20, reader="reader:RllibReader", title="RLlib"),)
