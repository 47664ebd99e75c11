"""HDF5 files in robomimic's layout, as MimicGen, LIBERO and Isaac Lab write it too: read, downloaded and exported."""

from __future__ import annotations

from ...core.declarations import FormatDeclaration

__all__ = ["FORMATS"]

FORMATS = (
    FormatDeclaration(
        name="robomimic",
        package=__name__,
        order=2,
        reader="reader:RobomimicReader",
        source="reader:RobomimicSource",
        sink="export:RobomimicExporter",
        title="robomimic",
        written="HDF5 with a group for each episode",
        opened=("", "import h5py; print(list(h5py.File({})['data']))"),
        example=("lift/ph/low_dim", "lift ph low_dim"),
        found="HDF5 with groups data/demo_N",
        ends="the end of the group; terminated by dones with a sparse reward or success, else truncated; or --ends",
        final="where stored",
    ),
)
