"""Experiences that RLlib records, in JSON lines or Parquet files."""

from __future__ import annotations

from ...core.declarations import FormatDeclaration

__all__ = ["FORMATS"]

FORMATS = (
    FormatDeclaration(
        name="rllib",
        package=__name__,
        order=20,
        reader="reader:RllibReader",
        title="RLlib",
        found="JSON lines, also zipped, or Parquet with obs, actions, rewards and eps_id, dones or new_obs; Parquet of "
        "packed episodes",
        ends="terminateds or truncateds; dones, as --ends interprets them; a gap in t; the last row of an eps_id",
        final="where stored",
    ),
)
