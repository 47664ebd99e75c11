"""Replay buffers of Stable-Baselines3: pickles and npz files of their arrays are read."""

from __future__ import annotations

from ...core.declarations import FormatDeclaration

__all__ = ["FORMATS"]

FORMATS = (
    FormatDeclaration(
        name="sb3",
        package=__name__,
        order=23,
        reader="reader:Sb3Reader",
        title="Stable-Baselines3",
        found="pickles of a buffer; npz with observations, actions, rewards and dones of a column an environment",
        ends="dones, of which timeouts are time limits; without timeouts --ends interprets them",
        final="where stored",
    ),
)
