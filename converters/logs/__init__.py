"""Robot logs (MCAP, ROS 2 and ROS 1 bags), whose topics a user maps to keys of steps, and exports to MCAP."""

from __future__ import annotations

from ...core.declarations import FormatDeclaration

__all__ = ["FORMATS"]

FORMATS = (
    FormatDeclaration(
        name="logs",
        package=__name__,
        order=80,
        reader="reader:LogReader",
        overview="proposal:overview",
        title="Robot logs: MCAP, ROS 2 and ROS 1 bags",
        found="the first bytes of the files; --map assigns the topics",
        ends="by --episodes-by: the end of a file, a marker on a topic, or silence",
        final="yes",
        extra="logs",
        keeps_video=True,
    ),
    FormatDeclaration(
        name="mcap",
        package=__name__,
        order=93,
        sink="export:McapExporter",
        written="a log for viewers",
        title="MCAP for viewers",
        extra="logs",
        suffixes=(".mcap",),
        opened=("", "from mcap.reader import make_reader; print(make_reader(open({}, 'rb')).get_summary().statistics)"),
    ),
)
