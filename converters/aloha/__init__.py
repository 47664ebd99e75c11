"""HDF5 files of ALOHA and ACT, and of the related RoboTwin and RoboMIND, with one episode each: read."""

from __future__ import annotations

from ...core.declarations import FormatDeclaration

__all__ = ["FORMATS"]

FORMATS = (
    FormatDeclaration(
        name="aloha",
        package=__name__,
        order=19,
        reader="reader:AlohaReader",
        title="ALOHA",
        found="HDF5 with action and observations/qpos, or of RoboTwin or RoboMIND; a folder of such files",
        layout="packed",
        ends="the end of the file; truncated",
        final="where stored",
    ),
)
