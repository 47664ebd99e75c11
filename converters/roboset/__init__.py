"""RoboSet's HDF5 files, made with RoboHive: read, downloaded, and opened as buffers."""

from __future__ import annotations

from ...core.declarations import FormatDeclaration

__all__ = ["FORMATS"]

FORMATS = (
    FormatDeclaration(
        name="roboset",
        package=__name__,
        order=3,
        reader="reader:RobosetReader",
        source="reader:RobosetSource",
        title="RoboSet",
        example=("DAPG(expert)/door_v2d-v1", "door expert"),
        found="HDF5 with groups TrialN, or a folder of such files",
        ends="the end of the group; terminated by done, else truncated; or --ends",
        final="no",
    ),
)
