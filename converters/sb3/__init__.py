"""Replay buffers of Stable-Baselines3: pickles and npz files of their arrays are read, pickles exported."""

from __future__ import annotations

from ...core.declarations import FormatDeclaration

__all__ = ["FORMATS"]

FORMATS = (
    FormatDeclaration(
        name="sb3",
        package=__name__,
        order=23,
        reader="reader:Sb3Reader",
        sink="export:Sb3Exporter",
        title="Stable-Baselines3",
        written="a pickle for load_replay_buffer",
        opened=("", "from stable_baselines3.common.save_util import load_from_pkl; print(load_from_pkl({}).size())"),
        found="pickles of a buffer; npz with observations, actions, rewards and dones, one column per environment",
        ends="dones; truncated by timeouts, else terminated; without timeouts --ends interprets dones",
        final="where stored",
    ),
)
